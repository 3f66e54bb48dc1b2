"""The blocking client against a real server, which runs on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.errors import InvalidRequest
from jaxserve.request import Logprob, SamplingParams
from jaxserve.server.hub import TextParts
from jaxserve.v1 import control_pb2
from tests.fakes.engine import ScriptedEngine
from tests.server.harness import Serving, serving


@pytest.fixture
def server(text: TextParts) -> Iterator[Serving]:
    """A warm server that steps by itself."""
    up, down = threading.Event(), asyncio.Event()
    found: list[tuple[Serving, asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        async with serving(text, ScriptedEngine()) as running:
            found.append((running, asyncio.get_running_loop()))
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert up.wait(10)
    running, loop = found[0]
    yield running
    loop.call_soon_threadsafe(down.set)
    thread.join(10)


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    """A client of it."""
    with Client(server.address) as made:
        yield made


def test_generate_gives_the_whole_answer(client: Client) -> None:
    ids = client.tokenize("hello world")
    whole = client.generate("hello world", SamplingParams(max_tokens=9, n=2), request_id="mine")
    assert (whole.request_id, whole.prompt, whole.prompt_token_ids, whole.finished) == (
        "mine",
        "hello world",
        ids,
        True,
    )
    assert [output.index for output in whole.outputs] == [0, 1]
    for output in whole.outputs:
        assert output.token_ids == (ids * 9)[:9]
        assert output.text == client.detokenize(output.token_ids)
        assert output.finish_reason == "length" and output.logprobs is None


def test_ids_and_logprobs(client: Client) -> None:
    whole = client.generate([70, 71, 72], SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=0))
    assert whole.prompt is None and whole.prompt_token_ids == [70, 71, 72]
    logprobs = whole.outputs[0].logprobs
    assert logprobs is not None and [next(iter(position)) for position in logprobs] == [70, 71, 72, 70]
    assert logprobs[0][70] == Logprob(-0.5, 1, client.detokenize([70]))
    assert whole.prompt_logprobs is not None and whole.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in whole.prompt_logprobs[1:] if position] == [71, 72]


def test_stream_gives_deltas(client: Client) -> None:
    parts = list(client.stream("hello world", SamplingParams(max_tokens=30)))
    assert len(parts) > 1
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (
        "".join(part.outputs[0].text for part in parts)
        == client.generate("hello world", SamplingParams(max_tokens=30)).outputs[0].text
    )
    assert len({part.request_id for part in parts}) == 1


def test_chat(client: Client) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = client.chat(messages, SamplingParams(max_tokens=2, ignore_eos=True), template_kwargs={"depth": 1})
    assert len(whole.outputs[0].token_ids) == 2 and len(whole.prompt_token_ids) > 5
    assert whole.outputs[0].token_ids == whole.prompt_token_ids[:2]


def test_leaving_a_stream_frees_its_request(client: Client, server: Serving) -> None:
    for part in client.stream([7], SamplingParams(max_tokens=400)):
        assert not part.finished
        break
    for _ in range(500):
        if not client.load().live_requests:
            break
    assert client.load().live_requests == 0


def test_errors_have_status_sentence_and_field(client: Client) -> None:
    with pytest.raises(ServerError, match="at least one message") as caught:
        client.chat([])
    assert (caught.value.status, caught.value.field) == ("INVALID_ARGUMENT", "messages")
    with pytest.raises(ServerError) as caught:
        client.generate([7], SamplingParams(max_tokens=400), deadline_s=0.05)
    assert (caught.value.status, caught.value.field) == ("DEADLINE_EXCEEDED", None)
    with Client("127.0.0.1:1") as nobody:
        assert not nobody.is_serving()
        with pytest.raises(ServerError) as caught:
            nobody.server_info()
        assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize("call", ["generate", "chat", "tokenize", "stop"])
def test_b093_a_lone_surrogate_is_refused_before_it_travels(client: Client, call: str) -> None:
    bad = "a\ud800b"
    with pytest.raises(InvalidRequest, match=r"prompt|messages\[0\].content|text|stop"):
        if call == "chat":
            client.chat([{"role": "user", "content": bad}])
        elif call == "stop":
            client.generate("a", SamplingParams(stop=bad))
        else:
            getattr(client, call)(bad)


@pytest.mark.parametrize("wrong", [["one", "two"], [[1, 2], [3]], [1, 2.5], [True], [-1], [2**31]], ids=str)
def test_what_is_no_prompt_is_one_sentence(client: Client, wrong: list) -> None:
    with pytest.raises(
        InvalidRequest, match="prompt: got .*, allowed: a text, or a list of token ids from 0; one prompt"
    ):
        client.generate(wrong)


def test_the_server_is_described(client: Client) -> None:
    assert client.is_serving()
    assert client.model_info().model == "scripted"
    assert client.server_info().state == control_pb2.SERVER_STATE_SERVING
    assert client.load().total_pages == 1024


def test_a_flush_and_a_requests_word_on_the_cache(client: Client, server: Serving) -> None:
    client.flush_cache()
    client.generate([7], SamplingParams(max_tokens=2, cache_salt="mine", bypass_prefix_cache=True))
    assert server.engine.flushes == [0]
    with pytest.raises(InvalidRequest, match="cache_salt: got 'xxx.*, allowed: a text of at most 256 characters"):
        client.generate([7], SamplingParams(cache_salt="x" * 257))
    with pytest.raises(InvalidRequest, match="cache_salt"):
        client.generate([7], SamplingParams(cache_salt="\ud800"))


def test_abort_and_drain(client: Client) -> None:
    stream = client.stream([7], SamplingParams(max_tokens=500), request_id="mine")
    first = next(stream)
    assert client.abort("mine") and not client.abort("mine")
    rest = [first, *stream]
    assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "cancelled"
    assert client.drain(5.0) == 0
    with pytest.raises(ServerError, match="draining"):
        client.generate([7])


def test_many_threads_share_a_client(client: Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda token: client.generate([token], SamplingParams(max_tokens=5)), range(10, 60)))
    assert [answer.outputs[0].token_ids for answer in answers] == [[token] * 5 for token in range(10, 60)]


def test_importing_the_client_does_not_import_jax() -> None:
    code = "import sys, jaxserve.client; print([name for name in ('jax', 'jaxlib', 'flax') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
