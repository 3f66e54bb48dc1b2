"""A scripted engine for server tests: takes what the front submits, gives one EventBatch a step; there is no model."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.errors import JaxserveError
from jaxserve.request import Cancel, EngineStats, EventBatch, Finish, FlushCache, Logprobs, TokenRequest, Work
from jaxserve.server.link import EngineFacts, EngineSide

type Script = Callable[[TokenRequest, int], int]  # the request and how many tokens it has -> the next token

FACTS = EngineFacts(
    max_model_len=512,
    model_type="scripted",
    dtype="float32",
    platform="cpu",
    device_kind="cpu",
    num_devices=1,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    total_pages=1024,
    page_size_tokens=16,
    vocab_size=512,
    max_logprobs=20,
)


def echo(request: TokenRequest, at: int) -> int:
    """The prompt over and over: every caller can tell its own tokens."""
    return int(request.prompt_token_ids[at % len(request.prompt_token_ids)])


@dataclass
class Running:
    """A running sequence."""

    request: TokenRequest
    tokens: int = 0


@dataclass
class ScriptedEngine:
    """Runs up to `max_num_seqs` sequences, one token a step each. `live` is empty when nothing leaks."""

    script: Script = echo
    max_num_seqs: int = 256
    first_steps: int = 0  # steps that a sequence waits for its first token, as if its prompt were long
    live: dict[int, Running] = field(default_factory=dict)
    waiting: dict[int, TokenRequest] = field(default_factory=dict)
    cancels: list[Cancel] = field(default_factory=list)
    requests_seen: int = 0
    flushes: list[int] = field(default_factory=list)  # how many requests had come before each
    steps: int = 0
    failing: dict[int, str] = field(default_factory=dict)  # by first prompt token: the request fails with this sentence

    def submit(self, items: Sequence[Work]) -> None:
        """Take work in."""
        for item in items:
            if isinstance(item, Cancel):
                self.cancels.append(item)
            elif isinstance(item, FlushCache):
                self.flushes.append(self.requests_seen)
            else:
                assert item.handle not in self.live and item.handle not in self.waiting, "a handle was used twice"
                self.requests_seen += 1
                self.waiting[item.handle] = item

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self.live or self.waiting or self.cancels)

    def step(self) -> EventBatch | None:
        """One step of everything; None where nothing happened."""
        self.steps += 1
        rows: list[tuple[int, int, Finish]] = []
        logprobs: dict[int, Logprobs] = {}
        errors: dict[int, str] = {}
        started: list[int] = []
        self._cancel(rows)
        while self.waiting and len(self.live) < self.max_num_seqs:
            handle = next(iter(self.waiting))
            self.live[handle] = Running(self.waiting.pop(handle), -self.first_steps)
        for handle, sequence in list(self.live.items()):
            request = sequence.request
            if int(request.prompt_token_ids[0]) in self.failing:
                errors[handle] = self.failing[int(request.prompt_token_ids[0])]
                rows.append((handle, -1, Finish.ERROR))
                del self.live[handle]
                continue
            if sequence.tokens < 0:
                sequence.tokens += 1
                continue
            if sequence.tokens == 0:
                started.append(handle)
            token = self.script(request, sequence.tokens)
            sequence.tokens += 1
            finish = self._finish(sequence, token)
            if request.logprobs is not None:
                logprobs[len(rows)] = one_position(token, request.logprobs)
            rows.append((handle, token, finish))
            if finish is not Finish.NONE:
                del self.live[handle]
        if not rows:
            return None
        prompt_logprobs = {
            row[0]: prompt_positions(self.live[row[0]].request)
            for row in rows
            if row[0] in started and row[0] in self.live and self.live[row[0]].request.prompt_logprobs is not None
        }
        return EventBatch(
            handles=np.array([row[0] for row in rows], np.int64),
            token_ids=np.array([row[1] for row in rows], np.int32),
            finishes=np.array([int(row[2]) for row in rows], np.uint8),
            cached_tokens=dict.fromkeys(started, 0),
            queue_s=dict.fromkeys(started, 0.0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
        )

    def _cancel(self, rows: list[tuple[int, int, Finish]]) -> None:
        for cancel in self.cancels:
            if self.waiting.pop(cancel.handle, None) or self.live.pop(cancel.handle, None):
                rows.append((cancel.handle, -1, cancel.reason))
        self.cancels.clear()

    @staticmethod
    def _finish(sequence: Running, token: int) -> Finish:
        if token in sequence.request.stop_token_ids and sequence.tokens > sequence.request.min_tokens:
            return Finish.STOP
        return Finish.LENGTH if sequence.tokens >= sequence.request.max_tokens else Finish.NONE

    def stats(self) -> EngineStats:
        """What the real engine would report."""
        return EngineStats(
            step_count=self.steps,
            running_requests=len(self.live),
            waiting_requests=len(self.waiting),
            total_pages=1024,
            live_pages=len(self.live),
            free_pages=1024 - len(self.live),
        )


def one_position(token: int, count: int) -> Logprobs:
    """Logprobs of one position: the chosen token is the best one, the others follow by id."""
    others = [(token + i) % 512 for i in range(count)]
    return Logprobs(
        np.array([-0.5], np.float32),
        np.array([1], np.int32),
        np.array([others], np.int32),
        np.array([[-0.5 - i for i in range(count)]], np.float32),
    )


def prompt_positions(request: TokenRequest) -> Logprobs:
    """Logprobs of the prompt's tokens from the second one on."""
    count = request.prompt_logprobs or 0
    rows = [one_position(int(token), count) for token in request.prompt_token_ids[1:]]
    return Logprobs(
        np.concatenate([row.chosen for row in rows]) if rows else np.zeros(0, np.float32),
        np.concatenate([row.rank for row in rows]) if rows else np.zeros(0, np.int32),
        np.concatenate([row.top_ids for row in rows]) if rows else np.zeros((0, count), np.int32),
        np.concatenate([row.top for row in rows]) if rows else np.zeros((0, count), np.float32),
    )


def run_engine(
    address: str,
    authkey: bytes,
    fail_with: JaxserveError | None = None,
    start_s: float = 0.0,
    step_period_s: float = 0.002,
) -> None:
    """The whole of an engine's process, as `app` has it, around a scripted engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both processes; the front decides
    side = EngineSide(address, authkey)
    side.progress("loading weights", 0.0)
    if fail_with is not None:
        side.fail(fail_with)
        side.close()
        return
    threading.Event().wait(start_s)  # compiling: nothing can interrupt it
    inbox: queue.SimpleQueue[list[Work]] = queue.SimpleQueue()
    stop = threading.Event()
    engine = ScriptedEngine()
    side.ready(FACTS, inbox.put, engine.stats, stop.set)
    while not stop.is_set():
        while not inbox.empty():
            engine.submit(inbox.get())
        batch = engine.step()
        if batch is not None:
            side.emit(batch)
        stop.wait(step_period_s)
    side.close()
