"""Pages, prefix cache and ledger under any order of operations: sums after each, and answers as of solo runs."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jaxserve.config import RuntimeConfig
from jaxserve.request import Finish, FlushCache, TokenRequest
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import Row, make_shape, next_token

OPERATIONS, EXAMPLES = 100, 100  # 10,000 in all
LAST = 1 << 20  # seeds from here on have bad logits at their second token


class Pool(RuleBasedStateMachine):
    """A model of the engine: which requests there are, and what each answers when it is alone."""

    bench: Bench

    @initialize(
        num_slots=st.integers(1, 4),
        num_pages=st.integers(9, 24),
        lanes=st.sampled_from([1, 1, 2]),
        eviction=st.sampled_from(["lru", "lfu", "priority"]),
        deterministic=st.sampled_from([False, False, True]),
    )
    def start(self, num_slots: int, num_pages: int, lanes: int, eviction: str, deterministic: bool) -> None:
        """An engine with little room; contexts of at most nine pages of 16 tokens always fit."""

        def script(row: Row) -> int | np.ndarray:
            bad = row.install.seed >= LAST and row.output_index == 1
            return np.full(1000, np.nan, np.float32) if bad else next_token(row.history, 1000)

        shape = make_shape(num_slots, num_pages, 16, 144, 2, lanes=lanes)
        runtime = RuntimeConfig(mixed_buckets=(16, 40), deterministic=deterministic)
        self.bench = Bench(shape, budget_tokens=40, runtime=runtime, eviction=eviction, script=script)

    def ask(self, prompt: np.ndarray, max_tokens: int, **fields: object) -> None:
        """A request."""
        handle = len(self.bench.requests)
        seed = handle + (LAST if fields.pop("bad", False) else 0)
        request = TokenRequest(handle, prompt.astype(np.int32), max_tokens, seed=seed, **fields)
        self.bench.submit(request)

    def alive(self, draw: int) -> int | None:
        """One of those that run or wait."""
        live = [*self.bench.engine.ledger.live]
        return live[draw % len(live)] if live else None

    @rule(family=st.integers(0, 2), tokens=st.integers(1, 90), more=st.integers(1, 50), kind=st.integers(0, 9))
    def admit(self, family: int, tokens: int, more: int, kind: int) -> None:
        """A prompt that begins as others of its family do."""
        fields: dict[int, dict[str, object]] = {
            7: {"cache_salt": "salt"},
            8: {"bypass_prefix_cache": True, "priority": -1},
            9: {"bad": True},
        }
        self.ask(make_request(family, tokens, 1).prompt_token_ids, more, **fields.get(kind, {}))

    @rule(draw=st.integers(0, 1000), more=st.integers(1, 30))
    def next_turn(self, draw: int, more: int) -> None:
        """An earlier prompt with as much of its answer as there is, and more."""
        if self.bench.requests:
            handle = draw % len(self.bench.requests)
            known = np.concatenate((self.bench.requests[handle].prompt_token_ids, self.bench.tokens(handle)))
            self.ask(np.concatenate((known[:100], [draw % 900])), more)

    @rule(count=st.integers(1, 6))
    def grow(self, count: int) -> None:
        """Steps: prompts advance, sequences grow, end and make others leave."""
        self.bench.step(count)

    @rule(draw=st.integers(0, 1000), reason=st.sampled_from([Finish.CANCELLED, Finish.STOP, Finish.DEADLINE]))
    def cancel(self, draw: int, reason: Finish) -> None:
        """One ends."""
        handle = self.alive(draw)
        if handle is not None:
            self.bench.cancel(handle, reason=reason)
            self.bench.step()

    @rule(draw=st.integers(0, 1000))
    def preempt(self, draw: int) -> None:
        """One loses its slot."""
        ledger = self.bench.engine.ledger
        handle = self.alive(draw)
        if handle is not None and (slot := ledger.live[handle].slot) >= 0:
            slots = ledger.lanes[ledger.live[handle].lane].slots
            if slot in slots.prefilling or slots.decoding_S[slot]:
                self.bench.preempt(handle)
                ledger.check()

    @rule(draw=st.integers(0, 1000))
    def evict(self, draw: int) -> None:
        """A part of the cache goes, as where pages are short."""
        for lane in self.bench.engine.ledger.lanes:
            assert lane.pool.prefix is not None
            if lane.pool.cached_pages:
                lane.pool._push(lane.pool.prefix.evict(1 + draw % lane.pool.cached_pages))
        self.bench.engine.ledger.check()

    @rule()
    def flush(self) -> None:
        """All of it goes."""
        self.bench.engine.submit([FlushCache()])
        self.bench.step()

    def teardown(self) -> None:
        """Everybody ends, nothing is lost, and nobody's answer shows anybody else's prompt."""
        if not hasattr(self, "bench"):
            return
        self.bench.finish()
        for handle, answer in self.bench.answers.items():
            if answer.finish is Finish.LENGTH:
                assert answer.token_ids == self.bench.solo(handle)
            else:
                assert answer.token_ids == self.bench.solo(handle)[: len(answer.token_ids)]


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=OPERATIONS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
