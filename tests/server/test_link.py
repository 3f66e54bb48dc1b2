"""The link between front and engine: order, merging, and what happens when one side dies."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.request import Cancel, EngineStats, EventBatch, TokenRequest
from jaxserve.server import link
from jaxserve.server.link import Busy, EngineSide, Failed, FrontSide, News, Progress, Ready, merge_news
from tests.fakes.engine import FACTS


def batch(*tokens: int) -> EventBatch:
    """Events of one step."""
    return EventBatch(np.arange(len(tokens)), np.array(tokens, np.int32), np.zeros(len(tokens), np.uint8))


@pytest.fixture
async def front() -> AsyncIterator[FrontSide]:
    """A listening front."""
    side = FrontSide()
    await side.listen()
    yield side
    await side.close()


async def connect(front: FrontSide, gone: threading.Event | None = None) -> EngineSide:
    """An engine's side in this process."""
    on_gone = (gone or threading.Event()).set
    return await asyncio.to_thread(EngineSide, front.address, front.authkey, on_gone)


def test_batches_that_follow_each_other_travel_together() -> None:
    one, two, three = batch(1), batch(2), batch(3)
    stats = EngineStats(step_count=3)
    merged = merge_news([Progress("x"), one, two, Busy("compiling"), three], stats)
    assert merged == [Progress("x"), News((one, two)), Busy("compiling"), News((three,), stats)]
    assert merge_news([], None) == []
    assert merge_news([], stats) == [News((), stats)]


async def test_records_arrive_in_order(front: FrontSide) -> None:
    engine = await connect(front)
    engine.progress("loading weights", 0.5)
    engine.ready(FACTS, lambda items: None, EngineStats, lambda: None)
    for token in range(50):
        engine.emit(batch(token))
    await asyncio.to_thread(engine.close)
    records = [record async for record in front.records()]
    assert records[0] == Progress("loading weights", 0.5)
    assert Ready(FACTS) in records
    tokens = [int(b.token_ids[0]) for record in records if isinstance(record, News) for b in record.batches]
    assert tokens == list(range(50))


async def test_one_turn_of_the_loop_is_one_message(front: FrontSide) -> None:
    got: list[list[object]] = []
    arrived = threading.Event()

    def submit(items: list[object]) -> None:
        got.append(items)
        if sum(map(len, got)) == 101:
            arrived.set()

    engine = await connect(front)
    engine.ready(FACTS, submit, EngineStats, lambda: None)
    assert isinstance(await anext(front.records()), Ready | News)
    for handle in range(100):
        front.submit([TokenRequest(handle, np.array([1, 2], np.int32), 5)])
    front.submit([Cancel(7)])
    assert await asyncio.to_thread(arrived.wait, 5)
    assert [len(items) for items in got] == [101]
    assert isinstance(got[0][0], TokenRequest) and got[0][0].prompt_token_ids.tolist() == [1, 2]
    assert got[0][-1] == Cancel(7)
    await asyncio.to_thread(engine.close)


async def test_stats_come_without_events(front: FrontSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "STATS_PERIOD_S", 0.01)
    engine = await connect(front)
    engine.ready(FACTS, lambda items: None, lambda: EngineStats(step_count=42), lambda: None)
    async for record in front.records():
        if isinstance(record, News) and record.stats is not None:
            assert record.stats.step_count == 42
            break
    await asyncio.to_thread(engine.close)


async def test_a_failure_travels_with_its_sentence_and_exit_code(front: FrontSide) -> None:
    engine = await connect(front)
    engine.fail(CheckpointError("shard 2 of 3 is missing"))
    await asyncio.to_thread(engine.close)
    assert [record async for record in front.records()] == [Failed("shard 2 of 3 is missing", 4)]


async def test_the_front_can_stop_the_engine(front: FrontSide) -> None:
    stopped, gone = threading.Event(), threading.Event()
    engine = await connect(front, gone)
    engine.ready(FACTS, lambda items: None, EngineStats, stopped.set)
    assert isinstance(await anext(front.records()), Ready | News)
    front.stop_engine()
    assert await asyncio.to_thread(stopped.wait, 5)
    await asyncio.to_thread(engine.close)
    assert not gone.is_set()


async def test_a_stop_before_the_engine_has_connected_is_not_lost(front: FrontSide) -> None:
    """An engine that is still starting has nothing to finish: it ends at once."""
    gone = threading.Event()
    front.stop_engine()
    engine = await connect(front, gone)
    assert await asyncio.to_thread(gone.wait, 5)
    await asyncio.to_thread(engine.close)


async def test_the_engine_sees_that_the_front_is_gone(front: FrontSide) -> None:
    gone = threading.Event()
    engine = await connect(front, gone)
    engine.ready(FACTS, lambda items: None, EngineStats, lambda: None)
    assert isinstance(await anext(front.records()), Ready | News)
    await front.close()
    assert await asyncio.to_thread(gone.wait, 5)
    engine.emit(batch(1))  # into the void, without an error
    await asyncio.to_thread(engine.close)


async def test_a_broken_link_ends_the_engine(front: FrontSide, caplog: pytest.LogCaptureFixture) -> None:
    """Here the engine's inbox fails; a thread that dies without a word would leave a server that answers nobody."""
    gone = threading.Event()
    engine = await connect(front, gone)

    def submit(items: object) -> None:
        raise ValueError("no such inbox")

    engine.ready(FACTS, submit, EngineStats, lambda: None)
    assert isinstance(await anext(front.records()), Ready | News)
    front.submit([Cancel(1)])
    assert await asyncio.to_thread(gone.wait, 5)
    assert "no such inbox" in caplog.text
    await asyncio.to_thread(engine.close)


async def test_an_engine_that_ignores_the_stop_ends_with_the_link(front: FrontSide) -> None:
    stopped, gone = threading.Event(), threading.Event()
    engine = await connect(front, gone)
    engine.ready(FACTS, lambda items: None, EngineStats, stopped.set)
    assert isinstance(await anext(front.records()), Ready | News)
    front.stop_engine()
    assert await asyncio.to_thread(stopped.wait, 5) and not gone.is_set()
    await front.close()
    assert await asyncio.to_thread(gone.wait, 5)
    await asyncio.to_thread(engine.close)


async def test_a_stranger_is_not_let_in(front: FrontSide) -> None:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(5)
    stranger.connect(front.address)
    stranger.sendall(b"x" * len(front.authkey))
    assert await asyncio.to_thread(stranger.recv, 1) == b""
    stranger.close()
    engine = await connect(front)
    engine.progress("hello")
    await asyncio.to_thread(engine.close)
    assert [record async for record in front.records()] == [Progress("hello")]


async def test_only_this_user_may_reach_the_socket(front: FrontSide) -> None:
    assert os.stat(os.path.dirname(front.address)).st_mode & 0o077 == 0


async def test_close_removes_the_socket() -> None:
    side = FrontSide()
    await side.listen()
    await side.close()
    assert not os.path.exists(os.path.dirname(side.address))


def die_at_once() -> None:
    """An engine process that never gets to connect."""
    os._exit(3)


def die_after_hello(address: str, authkey: bytes) -> None:
    """An engine process that is killed while it serves."""
    side = EngineSide(address, authkey)
    side.ready(FACTS, lambda items: None, EngineStats, lambda: None)
    side.emit(batch(1))
    threading.Event().wait(0.2)
    os._exit(9)


async def test_a_process_that_dies_before_it_connects_ends_the_records(front: FrontSide) -> None:
    process = multiprocessing.get_context("spawn").Process(target=die_at_once)
    process.start()
    assert [record async for record in front.records(process.sentinel)] == []
    process.join()


async def test_a_process_that_dies_later_ends_the_records(front: FrontSide) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=die_after_hello, args=(front.address, front.authkey))
    process.start()
    records = [record async for record in front.records(process.sentinel)]
    process.join()
    assert Ready(FACTS) in records
    assert process.exitcode == 9
