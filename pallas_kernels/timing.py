"""Times an op on a device without its dispatch: takes a problem from an op's benchmark, gives microseconds a call.

Method: one jitted program holds many calls in a row, each fed with the output of the one before (so that none can
overlap or be dropped) and with the next of several sets of buffers, together larger than the L2 cache. The program is
dispatched several times without waiting in between, which XLA replays as a graph from the second run on; time over
calls, the median of several rounds. What is made once a step and shared by all calls (a work list) is in the program
once. The gap between two programs is in the figure: a few microseconds over all calls of one.
"""

from __future__ import annotations

import collections
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

L2_BYTES = 60 << 20
_ROTATED_BYTES = 4 * L2_BYTES
_ROUND_S = 0.02
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Problem:
    """One case with its arrays on the device.

    first: what the first call is fed with, of the shape of its output. shared: arrays that all calls take.
    sets: one tuple of arrays a call, used in turn. reference: fp32 result of the first call. limit: by bytes or by
    operations, whichever is larger, at the best rates seen on an H200.
    """

    case_id: str
    first: jax.Array
    shared: tuple[jax.Array, ...]
    sets: Sequence[tuple[jax.Array, ...]]
    reference: Callable[[], jax.Array]
    least_bytes: int
    operations: int

    @property
    def limit_us(self) -> float:
        """Microseconds that no implementation can beat by much."""
        return max(self.least_bytes / 4.62e6, self.operations / 790e6)


Step = Callable[[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]], jax.Array]


def sets_needed(bytes_a_call: int) -> int:
    """How many sets of buffers keep a call from finding its own in the cache."""
    return max(1, min(64, -(-_ROTATED_BYTES // bytes_a_call)))


def chain(step: Step, problem: Problem, calls: int) -> Callable[[], tuple[jax.Array, jax.Array]]:
    """A compiled program of that many calls, ready to run; it gives the results of the last call and of the first."""

    def program(first: jax.Array, shared: tuple[jax.Array, ...], sets: Any) -> tuple[jax.Array, jax.Array]:
        results = [first]
        for index in range(calls):
            results.append(step(results[-1], shared, sets[index % len(sets)]))
        return results[-1], results[1]

    compiled = jax.jit(program).lower(problem.first, problem.shared, tuple(problem.sets)).compile()
    return lambda: compiled(problem.first, problem.shared, tuple(problem.sets))


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds a call, median and lowest of the rounds, and what the first call gave."""

    median_us: float
    best_us: float
    first: np.ndarray  # fp32


def time_calls(step: Step, problem: Problem) -> Timed:
    """Compiles, warms up and times a chain of calls."""
    calls = int(max(2, min(48, 8000 / problem.limit_us)))
    run = chain(step, problem, calls)
    for _ in range(4):  # the second run records the graph, the later ones settle addresses
        _, first = jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    runs = max(2, min(100, int(_ROUND_S / (time.perf_counter() - start))))
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(runs):
            last = run()
        jax.block_until_ready(last)
        rounds.append((time.perf_counter() - start) * 1e6 / (runs * calls))
    return Timed(statistics.median(rounds), min(rounds), np.asarray(first, np.float32))


def kernels_us(step: Step, problem: Problem, calls: int = 4) -> dict[str, float]:
    """Mean device time of each kernel of a call, by name, read from a profile (which runs without graphs)."""
    run = chain(step, problem, calls)
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [path] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        totals: dict[str, float] = collections.defaultdict(float)
        for plane in profile.planes:
            if "/device:GPU" in plane.name:
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            totals[event.name] += event.duration_ns / 1000 / calls
    return dict(totals)
