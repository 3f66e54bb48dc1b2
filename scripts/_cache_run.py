"""Runs requests through the real engine without a model: a device that answers at once with random tokens.

Its clock is its own: a step lasts as long as it would on an H200, so that sessions overlap as they would there.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.batch import Batch, Bucket, Install, Layout, Program, Shape, StepOut
from jaxserve.config import CacheConfig, RuntimeConfig, ScheduleConfig
from jaxserve.engine.loop import Engine
from jaxserve.engine.pages import pages_for
from jaxserve.request import EventBatch, Finish, TokenRequest
from scripts._cache_trace import Session, Trace, Turn

DECODE_S, PROMPT_TOKENS_S = 0.008, 90_000  # a decode step of 16 rows, and prompts: V2-Lite on an H200
WARM_STEPS, TIMED_STEPS = 50, 300


class RandomRunner:
    """A device that samples at random. elapsed_s: what its steps would have taken."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self._shape, self._rng = shape, np.random.default_rng(seed)
        self._out: list[StepOut] = []
        self._rows: dict[Bucket, int] = {}  # sampled ones; made once, as its time would be the engine's here
        self.elapsed_s = 0.0

    def install(self, installs: list[Install]) -> None:
        """Nothing to remember."""

    def dispatch(self, batch: Batch) -> RandomRunner:
        """Nothing to run."""
        if batch.bucket not in self._rows:
            self._rows[batch.bucket] = Layout(batch.bucket, self._shape).sampled_rows
        size = (self._shape.lanes, self._rows[batch.bucket])
        tokens = self._rng.integers(0, self._shape.vocab_size, size).astype(np.int32)
        self._out.append(StepOut(tokens, np.zeros(size, bool)))
        prompts = 0 if batch.bucket.program is Program.DECODE else batch.bucket.rows
        self.elapsed_s += DECODE_S + prompts / PROMPT_TOKENS_S
        return self

    def result(self) -> StepOut:
        """The oldest step's."""
        return self._out.pop(0)

    def recover(self) -> bool:
        """Never asked."""
        return False


@dataclass(slots=True)
class Answer:
    """What came back for a request so far."""

    token_ids: list[int]
    cached_tokens: int = 0
    done: bool = False


class Rig:
    """An engine over a RandomRunner, stepped by hand, and the answers."""

    def __init__(
        self,
        num_pages: int,
        *,
        slots: int = 64,
        page_size_tokens: int = 64,
        max_model_len: int = 8192,
        prefix_cache: bool = True,
        eviction: str = "lru",
    ) -> None:
        self.shape = Shape(
            num_slots=slots,
            num_pages=num_pages,
            page_size_tokens=page_size_tokens,
            max_pages_per_seq=pages_for(max_model_len, page_size_tokens),
            max_chunks=16,
            vocab_size=100_000,
            max_logprobs=20,
            max_model_len=max_model_len,
        )
        self.runner = RandomRunner(self.shape)
        self.idle_s = 0.0
        schedule = ScheduleConfig(max_num_seqs=slots, max_num_batched_tokens=4096, max_num_chunks=16)
        cache = CacheConfig(prefix_cache=prefix_cache, prefix_cache_eviction=eviction)
        self.engine = Engine(schedule, RuntimeConfig(), self.shape, self.runner, self._take, self.clock, cache)
        self.answers: dict[int, Answer] = {}
        self.ended: list[int] = []  # handles, until somebody takes them

    def clock(self) -> float:
        """Seconds: steps, and waiting for people."""
        return self.runner.elapsed_s + self.idle_s

    def submit(self, handle: int, prompt: np.ndarray, max_tokens: int) -> None:
        """Hand over a request that runs to its length."""
        self.answers[handle] = Answer([])
        self.engine.submit([TokenRequest(handle, prompt, max_tokens, seed=handle, arrival_s=self.clock())])

    def _take(self, batch: EventBatch) -> None:
        rows = zip(batch.handles.tolist(), batch.token_ids.tolist(), batch.finishes.tolist(), strict=True)
        for handle, token, finish in rows:
            answer = self.answers[handle]
            if finish == Finish.ERROR:
                raise RuntimeError(batch.errors[handle])
            answer.token_ids.append(token)
            if finish != Finish.NONE:
                answer.done = True
                self.ended.append(handle)
        for handle, tokens in batch.cached_tokens.items():
            self.answers[handle].cached_tokens = tokens


def converse(rig: Rig, trace: Trace) -> list[Turn]:
    """All sessions to their ends; the turns in the order in which they were asked."""
    waiting = [(session.thinking_s[0], session.number) for session in trace.sessions]
    heapq.heapify(waiting)
    turns: list[Turn] = []
    asked: dict[int, tuple[Session, int]] = {}  # by handle: the session, and the turn's place in `turns`
    is_system_seen = False
    while waiting or asked:
        while waiting and waiting[0][0] <= rig.clock():
            session = trace.sessions[heapq.heappop(waiting)[1]]
            prompt = np.concatenate((session.history, session.questions[session.next_turn]))
            handle, answer_tokens = len(turns), session.answers[session.next_turn]
            seen = len(session.history) if session.next_turn or is_system_seen else 0
            is_system_seen = True
            asked[handle] = session, handle
            turns.append(Turn(session.number, len(prompt), answer_tokens, seen, 0))
            session.history = prompt
            rig.submit(handle, prompt, answer_tokens)
        if not rig.engine.step() and waiting:
            rig.idle_s += max(0.0, waiting[0][0] - rig.clock())
        for handle in rig.ended:
            session, place = asked.pop(handle)
            answer = rig.answers.pop(handle)
            old = turns[place]
            turns[place] = Turn(*[getattr(old, name) for name in Turn.__slots__[:-1]], answer.cached_tokens)
            session.history = np.concatenate((session.history, np.array(answer.token_ids, np.int32)))
            session.next_turn += 1
            if session.next_turn < trace.plan.turns:
                heapq.heappush(waiting, (rig.clock() + session.thinking_s[session.next_turn], session.number))
        rig.ended.clear()
    return turns


def fragmentation(rig: Rig, requests: int, tokens: tuple[int, int], max_tokens: int, seed: int = 0) -> float:
    """Unused token slots of allocated pages, as a part of these, in the mean over the steps in which all run."""
    rng = np.random.default_rng(seed)
    for handle, count in enumerate(rng.integers(*tokens, requests).tolist()):
        rig.submit(handle, rng.integers(0, 100_000, count).astype(np.int32), max_tokens)
    found = []
    while not rig.engine.is_idle:
        rig.engine.step()
        [lane] = rig.engine.ledger.lanes
        running = [slot for slot, sequence in enumerate(lane.slots.sequences) if sequence is not None]
        if len(running) == requests and not lane.slots.prefilling:
            held = int(lane.pool.owned_S[running].sum()) * rig.shape.page_size_tokens
            found.append(1 - int(lane.slots.computed_S[running].sum()) / held)
    if not found:
        raise RuntimeError(f"the {requests} requests never ran at once")
    return statistics.mean(found)


def host_us(rig: Rig, running: int, waiting: int, prompt_tokens: int = 500) -> dict[str, float]:
    """Microseconds of the host for a step in which `running` decode and `waiting` wait: median and 99th percentile."""
    rng = np.random.default_rng(0)
    for handle in range(running + waiting):
        prompt = rng.integers(0, 100_000, prompt_tokens).astype(np.int32)
        rig.submit(handle, prompt, rig.shape.max_model_len - prompt_tokens)
    ledger = rig.engine.ledger
    rig.engine.step()
    while len(ledger.waiting) > waiting or any(lane.slots.prefilling for lane in ledger.lanes):
        rig.engine.step()
    taken = [timed(rig.engine.step) * 1e6 for _ in range(WARM_STEPS + TIMED_STEPS)][WARM_STEPS:]
    if len(ledger.waiting) != waiting:
        raise RuntimeError(f"{len(ledger.waiting)} wait, {waiting} were to")
    return {"median": statistics.median(taken), "p99": statistics.quantiles(taken, n=100)[98]}


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
