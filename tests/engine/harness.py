"""An engine over the scripted runner, stepped by hand; every step checks the page sums and every event its rules."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.batch import Shape
from jaxserve.config import CacheConfig, RuntimeConfig, ScheduleConfig
from jaxserve.engine.loop import Engine
from jaxserve.request import Cancel, EventBatch, Finish, Logprobs, TokenRequest
from tests.fakes.runner import FakeClock, Script, ScriptedRunner, make_shape, solo_tokens


@dataclass
class Answer:
    """All that came back for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # iteration in which each token was emitted
    finish: Finish = Finish.NONE
    error: str | None = None
    queue_s: float | None = None
    cached_tokens: int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None


class Bench:
    """Engine, runner, clock and answers."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        budget_tokens: int = 64,
        script: Script | None = None,
        runtime: RuntimeConfig | None = None,
        eviction: str | None = "lru",
        policy: str = "fcfs",
    ) -> None:
        """`eviction` None: no prefix cache."""
        self.shape = shape or make_shape()
        self.clock = FakeClock()
        self.runner = ScriptedRunner(self.shape, script, self.clock)
        schedule = ScheduleConfig(
            max_num_seqs=self.shape.num_slots,
            max_num_batched_tokens=budget_tokens,
            max_num_chunks=self.shape.max_chunks,
            policy=policy,
        )
        cache = CacheConfig(prefix_cache=False) if eviction is None else CacheConfig(prefix_cache_eviction=eviction)
        configs = (schedule, runtime or RuntimeConfig())
        self.engine = Engine(*configs, self.shape, self.runner, self.take, self.clock, cache)
        self.answers: dict[int, Answer] = {}
        self.requests: dict[int, TokenRequest] = {}
        self.batches: list[EventBatch] = []
        self.iterations = 0

    def take(self, batch: EventBatch) -> None:
        """The front: exactly one final row a sequence, and nothing after it."""
        self.batches.append(batch)
        assert batch.handles.dtype == np.int64 and batch.token_ids.dtype == np.int32
        assert batch.finishes.dtype == np.uint8 and len(set(batch.handles.tolist())) == len(batch.handles)
        for row, (handle, token, finish) in enumerate(
            zip(batch.handles.tolist(), batch.token_ids.tolist(), batch.finishes.tolist(), strict=True)
        ):
            answer = self.answers[handle]
            assert answer.finish is Finish.NONE, f"{handle}: a row after its end"
            answer.finish = Finish(finish)
            if token >= 0:
                answer.token_ids.append(token)
                answer.steps.append(self.iterations)
            else:
                assert answer.finish is not Finish.NONE
            if row in batch.logprobs:
                answer.logprobs.append(batch.logprobs[row])
        for handle, sentence in batch.errors.items():
            assert self.answers[handle].finish is Finish.ERROR
            self.answers[handle].error = sentence
        for name in ("queue_s", "cached_tokens", "prompt_logprobs"):
            for handle, value in getattr(batch, name).items():
                assert getattr(self.answers[handle], name) is None, f"{handle}: {name} twice"
                setattr(self.answers[handle], name, value)

    def submit(self, *requests: TokenRequest) -> None:
        """Hand requests to the engine."""
        for request in requests:
            self.answers[request.handle] = Answer()
            self.requests[request.handle] = request
        self.engine.submit(list(requests))

    def cancel(self, *handles: int, reason: Finish = Finish.CANCELLED) -> None:
        """Cancel some."""
        self.engine.submit([Cancel(handle, reason) for handle in handles])

    def preempt(self, handle: int) -> None:
        """Take a sequence out of its slot, as a lack of pages would."""
        self.engine.ledger.preempt(self.engine.ledger.live[handle])

    def step(self, count: int = 1) -> None:
        """Iterate and check what must always hold."""
        for _ in range(count):
            self.iterations += 1
            self.engine.step()
            self.engine.ledger.check()

    def finish(self, most_steps: int = 10_000) -> None:
        """Step until nothing is left; then everything must be back."""
        for _ in range(most_steps):
            if self.engine.is_idle:
                break
            self.step()
        assert self.engine.is_idle, f"not done after {most_steps} steps"
        stats, ledger = self.engine.stats(), self.engine.ledger
        assert (stats.live_pages, stats.running_requests, stats.waiting_requests) == (0, 0, 0)
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        for lane in ledger.lanes:
            assert len(lane.slots.free) == self.shape.num_slots and not lane.slots.leaving
        assert all(answer.finish is not Finish.NONE for answer in self.answers.values())

    def solo(self, handle: int) -> list[int]:
        """What a request's tokens are when it is alone."""
        request = self.requests[handle]
        return solo_tokens(request.prompt_token_ids, request.max_tokens, self.shape.vocab_size)

    def tokens(self, handle: int) -> list[int]:
        """The joined stream."""
        return self.answers[handle].token_ids


def make_request(handle: int, prompt_tokens: int, max_tokens: int, **fields: object) -> TokenRequest:
    """A request whose prompt no other handle has."""
    prompt = (np.arange(prompt_tokens) * 7 + handle * 131) % 997
    return TokenRequest(handle, prompt.astype(np.int32), max_tokens, seed=handle, **fields)
