"""Streams over a real channel: what arrives, what is refused and how, and what is left behind (nothing)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from jaxserve.errors import InvalidRequest
from jaxserve.request import Finish
from jaxserve.server.hub import TextParts
from jaxserve.server.link import Failed
from jaxserve.v1 import inference_pb2 as pb
from jaxserve.v1 import inference_pb2_grpc
from tests.fakes.engine import ScriptedEngine
from tests.server.harness import Serving, joined, request, serving


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            await joined(call)
        else:
            await call
    return caught.value


async def test_a_text_is_continued(text: TextParts) -> None:
    async with serving(text) as server:
        answer, ids, messages = await joined(server.inference.Generate(request("hello world", "mine", max_tokens=8)))
        prompt = (await server.inference.Tokenize(pb.TokenizeRequest(text="hello world"))).token_ids
        assert ids == (list(prompt) * 8)[:8]
        assert answer == (await server.inference.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text
        assert [message.request_id for message in messages] == ["mine"] + [""] * (len(messages) - 1)
        assert messages[-1].choices[0].finish_reason == pb.FINISH_REASON_LENGTH
        assert messages[-1].usage == pb.Usage(prompt_tokens=len(prompt), completion_tokens=8)
        assert not any(message.HasField("usage") for message in messages[:-1])
        await server.idle()


async def test_ids_are_taken_as_they_are(text: TextParts) -> None:
    async with serving(text) as server:
        asked = request([7, 300, 9], max_tokens=4)
        asked.return_prompt_token_ids = True
        _, ids, messages = await joined(server.inference.Generate(asked))
        assert ids == [7, 300, 9, 7]
        assert list(messages[0].prompt_token_ids) == [7, 300, 9]
        assert messages[0].request_id


async def test_a_conversation_is_answered(text: TextParts) -> None:
    assert text.tokenizer is not None and text.template is not None
    async with serving(text) as server:
        asked = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="hello")],
            sampling=pb.SamplingParams(max_tokens=3, ignore_eos=True),
            return_prompt_token_ids=True,
        )
        _, _, messages = await joined(server.inference.Chat(asked))
        rendered = text.template.render([{"role": "user", "content": "hello"}])
        assert list(messages[0].prompt_token_ids) == text.tokenizer.encode(rendered, add_special_tokens=False)
        asked.add_generation_prompt = False
        _, _, shorter = await joined(server.inference.Chat(asked))
        assert len(shorter[0].prompt_token_ids) < len(messages[0].prompt_token_ids)


async def test_choices_share_a_stream(text: TextParts) -> None:
    async with serving(text) as server:
        _, _, messages = await joined(server.inference.Generate(request([7, 8], n=3, max_tokens=5)))
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for message in messages:
            for choice in message.choices:
                ids[choice.index].extend(choice.token_ids)
        assert ids == dict.fromkeys(range(3), [7, 8, 7, 8, 7])
        assert messages[-1].usage == pb.Usage(prompt_tokens=2, completion_tokens=15)


async def test_a_stop_string_ends_the_choice_and_the_engines_part_of_it(text: TextParts) -> None:
    async with serving(text) as server:
        asked = request("hello world", max_tokens=100, stop=["world"])
        answer, _, messages = await joined(server.inference.Generate(asked))
        assert answer == "hello "
        last = messages[-1].choices[0]
        assert (last.finish_reason, last.stop_string) == (pb.FINISH_REASON_STOP, "world")
        await server.idle()
        _, _, messages = await joined(server.inference.Generate(request([5, 6], max_tokens=9, stop_token_ids=[6])))
        last = messages[-1].choices[0]
        assert (last.finish_reason, last.stop_token_id) == (pb.FINISH_REASON_STOP, 6)


async def test_logprobs_come_with_their_tokens(text: TextParts) -> None:
    async with serving(text) as server:
        asked = request([70, 71, 72], max_tokens=6, logprobs=2, prompt_logprobs=1)
        _, ids, messages = await joined(server.inference.Generate(asked))
        positions = [p for m in messages for c in m.choices for p in c.logprobs]
        assert [position.tokens[0].token_id for position in positions] == ids
        assert [(t.token_id, t.logprob, t.rank) for t in positions[0].tokens] == [(70, -0.5, 1), (71, -1.5, 2)]
        prompt = [p for m in messages for p in m.prompt_logprobs]
        assert [position.tokens[0].token_id for position in prompt] == [71, 72]


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        (request([1], temperature=-1.0), "temperature", "temperature: got -1.0, allowed: a number from 0 to 10000"),
        (request([1], n=9), "n", "n: got 9, allowed: an integer from 1 to 8"),
        (request([512]), "prompt_token_ids", "512"),
        (request([-1]), "prompt_token_ids", "-1"),
        (request([1] * 600), "prompt_token_ids", "max_model_len 512"),
        (request([]), "prompt_token_ids", "at least one token"),
        (request(""), "prompt", "at least one token"),
        (request([1], "x" * 300), "request_id", "at most 256 characters"),
        (pb.GenerateRequest(), "prompt", "text or token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_fields_are_named(text: TextParts, asked: pb.GenerateRequest, field: str, said: str) -> None:
    async with serving(text) as server:
        error = await refused(server.inference.Generate(asked))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in (error.details() or "")
        status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        details = error_details_pb2.BadRequest()
        assert status.code == error.code().value[0] and status.details[0].Unpack(details)
        assert details.field_violations[0].field == field
        await server.idle()


@pytest.mark.parametrize("bad", [b"\xed\xa0\x80", b"\xff\xff\xff"])
async def test_b093_hostile_bytes_name_the_field(text: TextParts, bad: bytes) -> None:
    """Bytes that no client library would send; other calls go on."""
    async with serving(text) as server:
        call = server.channel.unary_stream("/jaxserve.v1.Inference/Generate")
        other = asyncio.create_task(joined(server.inference.Generate(request([7], max_tokens=20))))
        for message in (request("XYZ"), request("ok", stop=["XYZ"])):
            error = await refused(call(message.SerializeToString().replace(b"XYZ", bad)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "UTF-8" in (error.details() or "") and "Error" not in (error.details() or "")
        error = await refused(call(b"\x0a\xff"))
        assert (error.code(), "GenerateRequest" in (error.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert (await other)[1] == [7] * 20


async def test_b093_nul_and_combining_marks(text: TextParts) -> None:
    """U+0000 is a character like others; a megabyte of combining marks is refused as too long, quickly."""
    async with serving(text) as server:
        assert (await joined(server.inference.Generate(request("a\0b", max_tokens=3))))[1]
        error = await refused(server.inference.Generate(request("e" + "\u0301" * 500_000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_model_len 512" in (error.details() or "")


async def test_a_long_sentence_still_arrives(text: TextParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata is limited: a status that does not fit would reach the client as something else."""
    async with serving(text) as server:

        def fail(*given: object) -> None:
            raise InvalidRequest("messages", "x", "\u6771" * 20_000)

        monkeypatch.setattr(server.server.hub.front, "submit", fail)
        error = await refused(server.inference.Generate(request([7])))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith("messages: got 'x', allowed: \u6771\u6771")
        assert (error.details() or "").endswith(" ...")


async def test_one_request_fails_and_the_others_go_on(text: TextParts) -> None:
    engine = ScriptedEngine(failing={66: "the logits of this request are not finite"})
    async with serving(text, engine) as server:
        good = asyncio.create_task(joined(server.inference.Generate(request([7], max_tokens=20))))
        error = await refused(server.inference.Generate(request([66], max_tokens=20)))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "the logits of this request are not finite"
        assert (await good)[1] == [7] * 20
        await server.idle()


async def test_a_defect_of_ours_is_internal_without_its_text(
    text: TextParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(text) as server:
        monkeypatch.setattr(server.server.hub.front, "submit", lambda *given: 1 / 0)
        error = await refused(server.inference.Generate(request([7])))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "division" not in (error.details() or "")
        assert "ZeroDivisionError" in caplog.text
        assert server.server.hub.open_streams == 0


async def test_the_engines_end_is_told_to_every_stream(text: TextParts) -> None:
    async with serving(text) as server:
        calls = [server.inference.Generate(request([7], max_tokens=500)) for _ in range(5)]
        for call in calls:
            assert (await call.read()).choices[0].token_ids[0] == 7
        server.server.hub.on_record(Failed("the device is out of memory", 5))
        for call in calls:
            error = await refused(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the device is out of memory")
        error = await refused(server.inference.Generate(request([7])))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the device is out of memory")


async def test_while_starting_requests_are_told_so(text: TextParts) -> None:
    async with serving(text, ready=False) as server:
        for call in (
            server.inference.Generate(request([7])),
            server.inference.Tokenize(pb.TokenizeRequest(text="a")),
        ):
            error = await refused(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "starting" in (error.details() or "")


async def test_a_full_queue_refuses_and_recovers(text: TextParts) -> None:
    engine = ScriptedEngine(first_steps=100_000)
    async with serving(text, engine, max_queue_requests=4) as server:
        calls = [server.inference.Generate(request([7])) for _ in range(256 + 4)]
        while server.server.hub.open_streams < len(calls):
            await asyncio.sleep(0.01)
        error = await refused(server.inference.Generate(request([7])))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-queue-requests 4" in (error.details() or "")
        for call in calls:
            call.cancel()
        await server.idle()
        engine.first_steps = 0
        assert (await joined(server.inference.Generate(request([7], max_tokens=2))))[1] == [7, 7]


async def test_a_reader_that_is_behind_gets_several_tokens_at_once(text: TextParts) -> None:
    """Nothing piles up for a slow client but one merged delta, and nothing is lost."""
    async with serving(text, step_period_s=None) as server:
        call = server.inference.Generate(request([7, 8, 9], max_tokens=400))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        for _ in range(400):
            server.step()  # all steps in one turn of the loop: the stream cannot keep up
        _, ids, messages = await joined(call)
        assert ids == ([7, 8, 9] * 134)[:400]
        assert len(messages) == 1


async def test_a_client_that_does_not_read_for_a_while_loses_nothing(text: TextParts) -> None:
    """Its window is full, so writes wait; the engine and other streams do not."""
    narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with (
        serving(text, step_period_s=0.001) as server,
        grpc.aio.insecure_channel(server.address, options=narrow) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        slow = stub.Generate(request([7, 8, 9], max_tokens=400, logprobs=20))
        assert (await joined(server.inference.Generate(request([5], max_tokens=450))))[1] == [5] * 450
        while not server.engine.idle:
            await asyncio.sleep(0.01)
        assert server.server.hub.open_streams == 1
        _, ids, messages = await joined(slow)
        assert ids == ([7, 8, 9] * 134)[:400]
        assert len(messages) < 390
        positions = [p for m in messages for c in m.choices for p in c.logprobs]
        assert [position.tokens[0].token_id for position in positions] == ids


async def left_behind(server: Serving) -> int:
    """Steps until the engine holds nothing any more, counted from when the server knows."""
    while server.server.hub.open_streams:
        await asyncio.sleep(0.001)
    for steps in range(10):
        if server.engine.idle:
            return steps
        server.step()
    raise AssertionError("still held after 10 steps")


@pytest.mark.parametrize("read", [0, 2])
async def test_b083_b081_a_client_that_leaves(text: TextParts, read: int) -> None:
    """Before its first token or in the middle: gone within two steps, and the reason counts as cancelled."""
    async with serving(text, ScriptedEngine(first_steps=0 if read else 50), step_period_s=None) as server:
        for _ in range(20):
            call = server.inference.Generate(request([7], max_tokens=400, ignore_eos=True))
            while not (server.engine.waiting or server.engine.live):
                await asyncio.sleep(0.001)
            for _ in range(read):
                server.step()
                assert await call.read() is not grpc.aio.EOF
            call.cancel()
            assert await left_behind(server) <= 2
        assert {cancel.reason for cancel in server.link.cancels} == {Finish.CANCELLED}
        assert len(server.link.cancels) == 20


async def test_b081_a_client_that_leaves_while_queued(text: TextParts) -> None:
    async with serving(text, ScriptedEngine(max_num_seqs=1), step_period_s=None) as server:
        first = server.inference.Generate(request([7], max_tokens=400))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        server.step()
        second = server.inference.Generate(request([8], max_tokens=400))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        second.cancel()
        while server.server.hub.open_streams > 1:
            await asyncio.sleep(0.001)
        server.step()
        assert not server.engine.waiting and len(server.engine.live) == 1
        first.cancel()
        assert await left_behind(server) <= 2


async def test_b081_a_closed_channel(text: TextParts) -> None:
    async with serving(text) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            calls = [
                channel.unary_stream("/jaxserve.v1.Inference/Generate")(
                    request([7], max_tokens=400, ignore_eos=True).SerializeToString()
                )
                for _ in range(20)
            ]
            await calls[-1].read()
        await server.idle()


async def test_a_deadline_frees_the_request(text: TextParts) -> None:
    async with serving(text, ScriptedEngine(first_steps=100_000)) as server:
        error = await refused(server.inference.Generate(request([7]), timeout=0.1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await server.idle()
        assert [cancel.reason for cancel in server.link.cancels] == [Finish.DEADLINE]


async def test_b085_a_storm_of_short_deadlines(text: TextParts) -> None:
    """Deadlines of 0 to 4 ms race with completion and with cancels; everyone gets his own tokens or a clear status."""
    async with serving(text, step_period_s=0.0005) as server:
        codes: dict[str, int] = {}

        async def one(at: int) -> None:
            token = 10 + at % 200
            call = server.inference.Generate(request([token], max_tokens=1 + at % 2), timeout=at % 5 / 1000 or 1e-6)
            if at % 7 == 0:
                asyncio.get_running_loop().call_later(at % 5 / 1000, call.cancel)
            try:
                _, ids, _ = await joined(call)
                assert set(ids) == {token}
                codes["OK"] = codes.get("OK", 0) + 1
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] = codes.get(error.code().name, 0) + 1
            except asyncio.CancelledError:
                codes["CANCELLED"] = codes.get("CANCELLED", 0) + 1

        for _ in range(5):
            await asyncio.gather(*(one(at) for at in range(200)))
        assert set(codes) <= {"OK", "DEADLINE_EXCEEDED", "CANCELLED"}
        assert sum(codes.values()) == 1000
        await server.idle()
        assert (await joined(server.inference.Generate(request([7], max_tokens=3))))[1] == [7] * 3


async def test_b095_nothing_is_held_after_mixed_traffic(text: TextParts) -> None:
    """Stops by id, string, length, cancel, error and deadline, n of 1 to 4; each drain ends with nothing held."""
    async with serving(text, ScriptedEngine(failing={66: "bad"}), step_period_s=0.0005) as server:

        async def one(at: int) -> None:
            prompt: list[int] | str = "hello world" if at % 6 == 1 else [66] if at % 6 == 4 else [7, 8, 9]
            stops: dict[str, Any] = {"stop": ["world"]} if at % 6 == 1 else {}
            stops |= {"stop_token_ids": [9]} if at % 6 == 0 else {}
            call = server.inference.Generate(
                request(prompt, n=1 + at % 4, max_tokens=1 + at % 9, **stops), timeout=0.01 if at % 6 == 5 else 20
            )
            if at % 6 == 3:
                await call.read()
                call.cancel()
            await asyncio.gather(joined(call), return_exceptions=True)

        for _ in range(4):
            await asyncio.gather(*(one(at) for at in range(60)))
            await server.idle()
            assert server.server.hub.front.num_live_requests == 0
            assert not server.engine.live and not server.engine.waiting


async def test_b091_a_live_id_is_refused_and_disturbs_nobody(text: TextParts) -> None:
    async with serving(text, step_period_s=None) as server:
        first = server.inference.Generate(request([7], "a", max_tokens=5))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        error = await refused(server.inference.Generate(request([8], "a", max_tokens=5)))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        children = server.inference.Generate(request([9], "a_0", n=3, max_tokens=5))
        while len(server.engine.waiting) < 4:
            await asyncio.sleep(0.001)
        for _ in range(5):
            server.step()
        assert (await joined(first))[1] == [7] * 5
        assert (await joined(children))[1] == [9] * 5
        again = server.inference.Generate(request([8], "a", max_tokens=1))
        while not server.engine.waiting:
            await asyncio.sleep(0.001)
        server.step()
        assert (await joined(again))[1] == [8]


async def test_b091_an_id_may_be_used_again_right_after_its_abort(text: TextParts) -> None:
    """The first one's stream is still being closed: that must not cancel the second one, or mix their tokens."""
    async with serving(text) as server:
        first = server.inference.Generate(request([7], "a", max_tokens=400))
        other = server.inference.Generate(request([6], "b", max_tokens=30))
        await first.read()
        hub = server.server.hub
        assert hub.front.cancel("a") and not hub.front.cancel("a")
        second = server.inference.Generate(request([8], "a", max_tokens=30))
        assert (await joined(second))[1] == [8] * 30
        assert (await joined(other))[1] == [6] * 30
        _, ids, messages = await joined(first)
        assert set(ids) <= {7}
        assert messages[-1].choices[0].finish_reason == pb.FINISH_REASON_CANCELLED
        assert messages[-1].HasField("usage")
        await server.idle()
