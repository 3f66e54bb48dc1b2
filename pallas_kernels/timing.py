"""Times an op on a device without its dispatch: takes a problem from an op's benchmark, gives microseconds a call.

Method: one jitted program holds many calls in a row, each fed with the output of the one before (so that none can
overlap or be dropped) and with the next of several sets of buffers, together larger than the L2 cache. What is made
once a step and shared by all calls (a work list) is in the program once. XLA replays a program as a graph from its
second run on. A round times one run and then several, dispatched without waiting in between: the difference over the
calls of the further runs is the figure, so that neither the first dispatch nor the last wait is in it. The host's own
share is given too: where it reaches the figure, the host is what was timed.
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
_ROUND_S = 0.03
_ROUNDS = 7
_CHAIN_US = 6000  # of a program's calls at the limit
# XLA makes a graph of this many kernels and more: so many are in no program.
_NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}


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


@dataclass(frozen=True, slots=True)
class Chain:
    """A compiled program of many calls in a row; run gives the results of the last call and of the first."""

    run: Callable[[], tuple[jax.Array, jax.Array]]
    calls: int


def chain(step: Step, problem: Problem, *, graphs: bool = True, loops: int = 1) -> Chain:
    """Compiles a program of as many calls as make some milliseconds.

    loops: above 1 the calls are the body of a loop on the device that runs so often. Buffers then stay where they are,
    so that a graph need not be updated: for calls that take less time than their dispatch.
    """
    calls = int(max(2, min(48, _CHAIN_US / problem.limit_us)))

    def program(first: jax.Array, shared: tuple[jax.Array, ...], sets: Any) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, fed: jax.Array) -> jax.Array:
            for index in range(calls):
                fed = step(fed, shared, sets[index % len(sets)])
            return fed

        if loops > 1:
            result = step(first, shared, sets[0])
            return jax.lax.fori_loop(0, loops, body, result), result
        results = [first]
        for index in range(calls):
            results.append(step(results[-1], shared, sets[index % len(sets)]))
        return results[-1], results[1]

    arguments = (problem.first, problem.shared, tuple(problem.sets))
    compiled = jax.jit(program).lower(*arguments).compile(compiler_options=None if graphs else _NO_GRAPHS)
    return Chain(lambda: compiled(*arguments), calls * loops + (loops > 1))


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds a call: median and lowest of the rounds, and what the host needs to dispatch it."""

    median_us: float
    best_us: float
    host_us: float
    first: np.ndarray  # what the first call gave, fp32


def time_chain(timed: Chain) -> Timed:
    """Warms up and times a chain of calls."""
    for _ in range(4):  # the second run records the graph, the later ones settle addresses
        _, first = jax.block_until_ready(timed.run())
    once_s, _ = _timed_s(timed, 1)
    runs = max(2, min(100, int(_ROUND_S / once_s)))
    rounds, hosts = [], []
    for _ in range(_ROUNDS):
        once_s, _ = _timed_s(timed, 1)
        all_s, host_s = _timed_s(timed, 1 + runs)
        rounds.append((all_s - once_s) * 1e6 / (runs * timed.calls))
        hosts.append(host_s * 1e6 / ((1 + runs) * timed.calls))
    return Timed(statistics.median(rounds), min(rounds), statistics.median(hosts), np.asarray(first, np.float32))


def _timed_s(timed: Chain, runs: int) -> tuple[float, float]:
    """Seconds until all is done, and until all is dispatched."""
    start = time.perf_counter()
    for _ in range(runs):
        last = timed.run()
    dispatched = time.perf_counter()
    jax.block_until_ready(last)
    return time.perf_counter() - start, dispatched - start


def kernels_us(profiled: Chain) -> dict[str, float]:
    """Mean device time of each kernel of a call, by name; see `traced_kernels`."""
    found = traced_kernels(profiled.run)
    return {name: us / profiled.calls for name, (us, _) in found.items()}


def traced_kernels(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Of a warm `run`, by kernel name: microseconds on the device, and launches; from a profile, which has no graphs.

    "(between kernels)" is what the device idled in it: the host may be the reason.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [path] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        events = [
            (event.start_ns, event.duration_ns, event.name)
            for plane in profile.planes
            if "/device:GPU" in plane.name
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    spans_us: dict[str, list[float]] = collections.defaultdict(list)
    for _, duration_ns, name in events:
        spans_us[name].append(duration_ns / 1000)
    totals = {name: (sum(spans), len(spans)) for name, spans in spans_us.items()}
    if events:
        whole_ns = max(start + duration for start, duration, _ in events) - min(start for start, _, _ in events)
        totals["(between kernels)"] = (whole_ns / 1000 - sum(us for us, _ in totals.values()), 0)
    return totals
