"""Front and engine as two processes: start, stop by signals, and the death of either."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

import grpc
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import CheckpointError, ConfigError, JaxserveError
from jaxserve.server.hub import TextParts
from jaxserve.server.link import FrontSide
from jaxserve.server.run import FrontParts, serve_front
from jaxserve.v1 import inference_pb2_grpc
from tests.fakes.engine import run_engine
from tests.server.harness import joined, request

CONFIG = ServerConfig(port=0, drain_timeout_s=5.0)


@dataclass
class Running:
    """A front in this process and an engine in another."""

    served: asyncio.Task[int]
    process: SpawnProcess
    lines: list[str]
    address: str

    async def said(self, start: str) -> str:
        """Wait for a line that the user sees."""
        for _ in range(1000):
            for line in self.lines:
                if line.startswith(start):
                    return line
            if self.served.done():
                break
            await asyncio.sleep(0.01)
        raise AssertionError(f"{start!r} was not said: {self.lines}")

    async def exit_codes(self) -> tuple[int, int | None]:
        """Of the front and of the engine's process."""
        code = await asyncio.wait_for(self.served, 20)
        await asyncio.to_thread(self.process.join, 20)
        return code, self.process.exitcode


@contextlib.asynccontextmanager
async def running(
    text: TextParts,
    config: ServerConfig = CONFIG,
    fail_with: JaxserveError | None = None,
    warm: bool = True,
    start_s: float = 0.0,
) -> AsyncIterator[Running]:
    """Start both."""
    link = FrontSide()
    await link.listen()
    process = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(link.address, link.authkey, fail_with, start_s), daemon=True
    )
    process.start()
    lines: list[str] = []
    parts = FrontParts("scripted", text, "0.0.0", lines.append)
    run = Running(asyncio.create_task(serve_front(config, parts, link, process.sentinel)), process, lines, "")
    try:
        if warm:
            run.address = (await run.said("serving on ")).removeprefix("serving on ")
        yield run
    finally:
        run.served.cancel()
        await asyncio.gather(run.served, return_exceptions=True)
        await link.close()
        await asyncio.to_thread(process.join, 10)
        if process.is_alive():
            process.kill()
        assert process.exitcode is not None, "the engine's process outlived its front"
        process.close()


@contextlib.asynccontextmanager
async def stub(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A client."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def test_requests_travel_to_the_other_process_and_back(text: TextParts) -> None:
    async with running(text) as run, stub(run.address) as client:
        calls = [client.Generate(request([10 + at], max_tokens=20)) for at in range(20)]
        for at, (_, ids, _) in enumerate(await asyncio.gather(*map(joined, calls))):
            assert ids == [10 + at] * 20
        assert "loading weights" in run.lines
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.exit_codes() == (0, 0)
        assert run.lines[-1] == "stopped"


async def test_a_signal_lets_live_requests_finish(text: TextParts) -> None:
    async with running(text) as run, stub(run.address) as client:
        call = client.Generate(request([7], max_tokens=200))
        first = await call.read()  # of one token, or of a few where the machine is busy
        os.kill(os.getpid(), signal.SIGINT)
        await run.said("waiting for 1 live requests")
        assert len((await joined(call))[1]) == 200 - len(first.choices[0].token_ids)
        assert await run.exit_codes() == (0, 0)


async def test_a_second_signal_stops_at_once(text: TextParts) -> None:
    async with running(text, dataclasses.replace(CONFIG, drain_timeout_s=300)) as run, stub(run.address) as client:
        call = client.Generate(request([7], max_tokens=100_000))
        await call.read()
        os.kill(os.getpid(), signal.SIGTERM)
        await run.said("waiting")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await joined(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopped before" in (caught.value.details() or "")
        assert (await run.exit_codes())[0] == 0


async def test_the_engines_death_ends_all_streams_and_the_server(text: TextParts) -> None:
    async with running(text) as run, stub(run.address) as client:
        calls = [client.Generate(request([7], max_tokens=100_000)) for _ in range(5)]
        for call in calls:
            await call.read()
        run.process.kill()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(joined(call), 2)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the engine's process has ended unexpectedly"
        assert await run.exit_codes() == (1, -signal.SIGKILL)


async def test_an_engine_that_cannot_start_gives_its_sentence_and_exit_code(text: TextParts) -> None:
    async with running(text, fail_with=CheckpointError("shard 2 of 3 is missing"), warm=False) as run:
        assert (await run.exit_codes())[0] == 4
        assert "shard 2 of 3 is missing" in run.lines


async def test_a_signal_while_starting_stops_both_at_once(text: TextParts) -> None:
    async with running(text, warm=False, start_s=60.0) as run:
        await run.said("loading weights")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.exit_codes() == (0, 1)


async def test_the_engine_ends_when_its_front_is_gone(text: TextParts) -> None:
    async with running(text) as run:
        run.served.cancel()
        await asyncio.gather(run.served, return_exceptions=True)
        await asyncio.to_thread(run.process.join, 10)
        assert run.process.exitcode == 1


async def test_a_port_in_use_ends_the_engine_too(text: TextParts) -> None:
    async with running(text) as run:
        config = dataclasses.replace(CONFIG, port=int(run.address.rsplit(":")[-1]))
        async with running(text, config, warm=False) as second:
            with pytest.raises(ConfigError, match="already in use"):
                await second.served
