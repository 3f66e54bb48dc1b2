"""Drivers of the benchmark: an engine in this process, or a server reached over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np

from jaxserve.client import Client, ServerError
from jaxserve.errors import EngineUnavailable
from jaxserve.request import Cancel, EventBatch, SamplingParams, TokenRequest
from scripts._bench_workloads import Ask, BenchError, Limits, Run

CANCEL_LIMIT_S = 60.0  # for cancelled requests to leave the engine
RUN_HANDLES = 1 << 20  # handles of one run start at a multiple of this

Submit = Callable[[list[TokenRequest | Cancel]], None]


@dataclass(slots=True)
class Collected:
    """What the engine's events of one run add up to; filled by the engine's thread, read by the driver's."""

    first_handle: int
    requests: int
    steps: list[tuple[float, np.ndarray]] = field(default_factory=list)  # when, and the requests that got a token
    finished: int = 0
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, events: EventBatch, now_s: float) -> None:
        """One step's events. Cheap: it runs between two steps."""
        index = events.handles - self.first_handle
        mine = (index >= 0) & (index < self.requests)
        self.steps.append((now_s, index[mine & (events.token_ids >= 0)]))
        self.finished += int(np.count_nonzero(mine & (events.finishes != 0)))
        if events.errors:
            self.error = next(iter(events.errors.values()))
        if self.finished >= self.requests:
            self.done.set()

    def token_s(self) -> list[np.ndarray]:
        """Per request, when its tokens came."""
        request = np.concatenate([index for _, index in self.steps])
        when_s = np.concatenate([np.full(len(index), now_s) for now_s, index in self.steps])
        order = np.argsort(request, kind="stable")
        bounds = np.searchsorted(request[order], np.arange(1, self.requests))
        return np.split(when_s[order], bounds)


class EngineDriver:
    """An engine that runs in a thread of this process. Made before it, because the engine is given `emit`."""

    limits: Limits

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._random = np.random.default_rng(0)
        self._runs = 0
        self._current: Collected | None = None

    def connect(self, submit: Submit, vocab_size: int, limits: Limits) -> None:
        """The engine's inbox and sizes, once there is an engine."""
        self._submit, self._vocab_size, self.limits = submit, vocab_size, limits

    def emit(self, events: EventBatch) -> None:
        """What the engine calls after each step."""
        if self._current is not None:
            self._current.take(events, self._clock())

    def run(self, asks: Sequence[Ask], limit_s: float) -> Run:
        """Send all, wait for all. Raises BenchError."""
        self._runs += 1
        first = self._runs * RUN_HANDLES
        requests: list[TokenRequest | Cancel] = [
            TokenRequest(
                handle=first + index,
                prompt_token_ids=self._random.integers(0, self._vocab_size, ask.prompt_tokens, dtype=np.int32),
                max_tokens=ask.max_tokens,
                seed=first + index,
            )
            for index, ask in enumerate(asks)
        ]
        self._current = collected = Collected(first, len(asks))
        start_s = self._clock()
        try:
            self._submit(requests)
        except EngineUnavailable as error:
            raise BenchError(str(error)) from error
        if not collected.done.wait(limit_s):
            self._submit([Cancel(first + index) for index in range(len(asks))])
            collected.done.wait(CANCEL_LIMIT_S)
            raise BenchError(f"not done within {limit_s:.0f} s")
        if collected.error is not None:
            raise BenchError(collected.error)
        return checked(Run(start_s, collected.token_s()), asks)


class ServerDriver:
    """A server reached over gRPC: one stream a request, each read by a thread of its own."""

    def __init__(
        self, client: Client, vocab_size: int, limits: Limits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits = limits
        self._client = client
        self._vocab_size = vocab_size
        self._clock = clock
        self._random = np.random.default_rng(0)

    def run(self, asks: Sequence[Ask], limit_s: float) -> Run:
        """Send all, wait for all. Raises BenchError."""
        prompts = [self._random.integers(0, self._vocab_size, ask.prompt_tokens).tolist() for ask in asks]
        with ThreadPoolExecutor(len(asks)) as pool:
            start_s = self._clock()
            futures = [
                pool.submit(self._one, prompt, ask, limit_s, seed)
                for seed, (prompt, ask) in enumerate(zip(prompts, asks, strict=True))
            ]
            try:
                for future in as_completed(futures):
                    future.result()
            except ServerError as error:
                raise BenchError(f"{error.status}: {error}") from error
        return checked(Run(start_s, [future.result() for future in futures]), asks)

    def _one(self, prompt: list[int], ask: Ask, limit_s: float, seed: int) -> np.ndarray:
        """When the tokens of one request came; those of one message came together."""
        params = SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False, seed=seed)
        token_s: list[float] = []
        for delta in self._client.stream(prompt, params, deadline_s=limit_s):
            token_s += [self._clock()] * len(delta.outputs[0].token_ids)
        return np.array(token_s)


def checked(run: Run, asks: Sequence[Ask]) -> Run:
    """The run, if every request got exactly the tokens it asked for: a rate over fewer would be no rate."""
    for times, ask in zip(run.token_s, asks, strict=True):
        if len(times) != ask.max_tokens:
            raise BenchError(f"a request got {len(times)} tokens in place of {ask.max_tokens}")
    return run
