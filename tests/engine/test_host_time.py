"""Host time of the engine alone: a steady decode step costs little and does not grow with what each request is.

Run `python -m tests.engine.test_host_time` to print the figures.
"""

from __future__ import annotations

import gc
import sys
import time

import numpy as np
import pytest

from jaxserve.batch import Batch, Install, StepOut
from jaxserve.config import CacheConfig, RuntimeConfig, ScheduleConfig
from jaxserve.engine.loop import Engine
from tests.engine.harness import make_request
from tests.fakes.runner import make_shape

GOAL_US = {1: 100.0, 256: 300.0}


class NullRunner:
    """Answers at once, always the same token."""

    def __init__(self, lanes: int, rows: int) -> None:
        self.out = StepOut(np.full((lanes, rows), 5, np.int32), np.zeros((lanes, rows), bool))

    def install(self, installs: list[Install]) -> None:
        """Nothing to remember."""

    def dispatch(self, batch: Batch) -> NullRunner:
        """Nothing to run."""
        return self

    def result(self) -> StepOut:
        """The same each time."""
        return self.out

    def recover(self) -> bool:
        """Never asked."""
        return False


def steady_engine(rows: int, page_size_tokens: int = 64, lanes: int = 1) -> Engine:
    """An engine in which `rows` sequences of each lane decode, far from their ends."""
    num_pages = 256 * 8192 // page_size_tokens
    shape = make_shape(256, num_pages, page_size_tokens, max_model_len=8192, max_chunks=16, lanes=lanes)
    schedule = ScheduleConfig(max_num_seqs=256, max_num_batched_tokens=4096)
    runner = NullRunner(lanes, 256)
    engine = Engine(schedule, RuntimeConfig(), shape, runner, lambda batch: None, cache=CacheConfig())
    engine.submit([make_request(handle, 100, 8000, stop_token_ids=(1, 2)) for handle in range(rows * lanes)])
    while not engine.step_count or engine.ledger.waiting or any(lane.slots.prefilling for lane in engine.ledger.lanes):
        engine.step()
    for _ in range(20):
        engine.step()
    assert [int(lane.slots.decoding_S.sum()) for lane in engine.ledger.lanes] == [rows] * lanes
    return engine


def step_us(engine: Engine, steps: int = 600) -> list[float]:
    """Microseconds of each of so many steps, sorted."""
    times = []
    for _ in range(steps):
        started_ns = time.perf_counter_ns()
        engine.step()
        times.append((time.perf_counter_ns() - started_ns) / 1000)
    return sorted(times)


def python_calls(engine: Engine, steps: int) -> int:
    """Calls of Python and C functions in so many steps."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # its callbacks are calls too
    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_steady_step_does_no_python_work_per_request() -> None:
    few, many = steady_engine(2, 4096), steady_engine(256, 4096)  # no row needs a new page
    assert python_calls(many, 50) == python_calls(few, 50)
    few, many = steady_engine(2), steady_engine(256)
    assert python_calls(many, 64) < 1.2 * python_calls(few, 64)


@pytest.mark.parametrize("rows", [1, 256])
def test_a_steady_step_is_quick(rows: int) -> None:
    """The fastest tenth stays within three times the goal, whatever else the machine does."""
    times = step_us(steady_engine(rows), 300)
    assert times[len(times) // 10] < 3 * GOAL_US[rows]


if __name__ == "__main__":
    for lanes, rows in ((1, 1), (1, 16), (1, 64), (1, 256), (2, 64), (8, 64), (8, 256)):
        times = step_us(steady_engine(rows, lanes=lanes), 2000)
        tenths = f"10% {times[200]:6.1f} us, 90% {times[1800]:6.1f} us"
        print(f"{lanes} x {rows:4d} rows: median {times[1000]:6.1f} us, {tenths}")
