"""The outbox holds one merged delta however far the reader is behind, and loses nothing."""

from __future__ import annotations

import asyncio

from jaxserve.request import CompletionOutput, Logprob, RequestOutput
from jaxserve.server.outbox import Outbox


def delta(index: int, text: str, ids: list[int], finish: str | None = None, **more: object) -> RequestOutput:
    """A delta of one choice."""
    output = CompletionOutput(index, text, ids, finish_reason=finish, stop_reason="x" if finish == "stop" else None)
    return RequestOutput("key", None, [], [output], **more)


async def test_deltas_of_a_slow_reader_are_merged() -> None:
    box = Outbox()
    for at in range(1000):
        box.put(delta(at % 2, f"{at},", [at]))
    box.put(delta(0, "", [7], "stop"))
    box.put(delta(1, "end", [8], "length", finished=True, num_cached_tokens=5))
    whole = await box.take()
    assert [output.index for output in whole.outputs] == [0, 1] and box.ended
    assert whole.outputs[0].token_ids == [*range(0, 1000, 2), 7]
    assert whole.outputs[1].text == "".join(f"{at}," for at in range(1, 1000, 2)) + "end"
    assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("stop", "x")
    assert (whole.outputs[1].finish_reason, whole.outputs[1].stop_reason) == ("length", None)
    assert whole.finished and whole.num_cached_tokens == 5
    assert box.merged_deltas == 1001


async def test_logprobs_stay_with_their_tokens() -> None:
    box = Outbox()
    for at in range(3):
        part = delta(0, "a", [at])
        part.outputs[0].logprobs = [{at: Logprob(-0.5, 1, "a")}]
        box.put(part)
    whole = await box.take()
    assert [next(iter(position)) for position in whole.outputs[0].logprobs or ()] == whole.outputs[0].token_ids


async def test_the_reader_sleeps_until_there_is_something() -> None:
    box = Outbox()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not reader.done()
    box.put(delta(0, "a", [1]))
    assert (await reader).outputs[0].text == "a"


async def test_a_cancelled_reader_leaves_the_outbox_usable() -> None:
    box = Outbox()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    box.put(delta(0, "a", [1]))
    assert (await box.take()).outputs[0].token_ids == [1]
