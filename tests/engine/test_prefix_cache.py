"""The prefix cache inside the engine, on the scripted runner: who shares what, what is told of it, and what ends it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.batch import Layout, Program
from jaxserve.config import RuntimeConfig
from jaxserve.request import Finish, FlushCache, TokenRequest
from tests.engine.harness import Bench
from tests.fakes.runner import Row, make_shape, next_token


def text(seed: int, tokens: int) -> np.ndarray:
    """Tokens that no other seed has."""
    return ((np.arange(tokens) * 7 + seed * 131) % 997).astype(np.int32)


def ask(bench: Bench, handle: int, prompt: np.ndarray, max_tokens: int = 4, **fields: object) -> None:
    """Submit a request."""
    bench.submit(TokenRequest(handle, prompt, max_tokens, seed=handle, **fields))


def run(bench: Bench, handle: int, prompt: np.ndarray, max_tokens: int = 4, **fields: object) -> int:
    """A request alone to its end, its tokens checked; returns its cached tokens."""
    ask(bench, handle, prompt, max_tokens, **fields)
    bench.finish()
    assert bench.tokens(handle) == bench.solo(handle)
    cached = bench.answers[handle].cached_tokens
    assert cached is not None
    return cached


def first_chunks(bench: Bench) -> list[int]:
    """Positions at which the chunks of all steps so far begin."""
    found = []
    for batch in bench.runner.batches:
        if batch.bucket.program is not Program.DECODE:
            views = Layout(batch.bucket, bench.shape).views(batch.vector[0])
            found += views["chunk_position"][views["chunk_tokens"] > 0].tolist()
    return found


def test_a_second_request_computes_only_what_is_new() -> None:
    bench = Bench()
    bench.runner.keep_batches = True
    assert run(bench, 1, text(1, 100)) == 0
    assert run(bench, 2, text(1, 100)) == 96
    assert run(bench, 3, np.concatenate((text(1, 70), text(2, 50)))) == 64
    assert first_chunks(bench) == [0, 64, 96, 64]
    stats = bench.engine.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (320, 160)
    assert stats.cached_pages == 6 + 3, "the pages of an answer's last tokens are not full"


def test_without_the_cache_nothing_stays() -> None:
    bench = Bench(eviction=None)
    assert [run(bench, handle, text(1, 100)) for handle in (1, 2)] == [0, 0]
    stats = bench.engine.stats()
    assert (stats.cached_pages, stats.prefix_query_tokens_total, stats.evicted_pages_total) == (0, 0, 0)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    bench = Bench(make_shape(num_pages=128))
    history = text(1, 50)
    for turn in range(6):
        cached = run(bench, turn, history, 30)
        assert cached == (len(history) - 11 - 1) // 16 * 16 if turn else not cached, (
            "all but the last token was written"
        )
        history = np.concatenate((history, bench.tokens(turn), text(100 + turn, 11))).astype(np.int32)


def test_a_prompt_is_shared_while_its_first_request_still_runs() -> None:
    bench = Bench(budget_tokens=32)
    ask(bench, 1, text(1, 200), 60)
    bench.step(4)
    ask(bench, 2, text(1, 90), 60)
    bench.step()
    assert int(bench.engine.ledger.lanes[0].slots.computed_S[bench.engine.ledger.live[2].slot]) >= 80
    assert bench.engine.stats().live_pages <= 9 + 2, "the first's pages are shared in the middle of its prompt"
    bench.finish()
    assert bench.answers[2].cached_tokens == 80
    for handle in (1, 2):
        assert bench.tokens(handle) == bench.solo(handle)


def test_requests_that_come_together_write_their_own_and_lose_nothing() -> None:
    bench = Bench(budget_tokens=400)
    for handle in range(4):
        ask(bench, handle, np.concatenate((text(1, 40), text(10 + handle, 30))), 20)
    bench.finish()
    assert [bench.answers[handle].cached_tokens for handle in range(4)] == [0, 0, 0, 0]
    for handle in range(4):
        assert bench.tokens(handle) == bench.solo(handle)
        again = np.concatenate((bench.requests[handle].prompt_token_ids, bench.tokens(handle))).astype(np.int32)
        assert run(bench, 10 + handle, again) == 80, "its own tail is cached behind the shared start"
    assert bench.engine.stats().cached_pages == 2 + 4 * 3


def test_b002_salts_do_not_meet() -> None:
    """B002: same tokens under no salt, an empty one, and two others; each finds its own only."""
    bench = Bench()
    salts = (None, "", "a", "b")
    for start, cached in ((0, 0), (4, 32)):
        for i, salt in enumerate(salts):
            assert run(bench, start + i, text(1, 33), cache_salt=salt) == cached


def test_bypass_takes_nothing_and_leaves_nothing() -> None:
    bench = Bench()
    assert run(bench, 1, text(1, 60), bypass_prefix_cache=True) == 0
    assert bench.engine.stats().cached_pages == 0
    assert [run(bench, 2, text(1, 60)), run(bench, 3, text(1, 60), bypass_prefix_cache=True)] == [0, 0]
    stats = bench.engine.stats()
    assert (stats.prefix_query_tokens_total, stats.cached_pages) == (60, 3)


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_b004_a_whole_prompt_in_the_cache(tokens: int, cached: int) -> None:
    """B004: at least the last token is computed; each prompt is sent twice, then with two choices."""
    bench = Bench()
    assert run(bench, 1, text(1, tokens)) == 0
    assert run(bench, 2, text(1, tokens)) == cached
    prompt = text(1, tokens)
    ask(bench, 3, prompt, 20)
    ask(bench, 4, prompt, 20)
    bench.finish()
    for handle in (3, 4):
        assert bench.tokens(handle) == bench.solo(handle) and bench.answers[handle].cached_tokens == cached
    longer = np.concatenate((prompt, bench.tokens(3))).astype(np.int32)
    assert run(bench, 5, longer) == (tokens + 20 - 1) // 16 * 16, "later pages entered"


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("together", [False, True])
def test_b006_a_cancel_while_a_page_is_shared(steps: int, together: bool) -> None:
    """B006: R2 has R1's 16 tokens and 4 more and is cancelled at any step; Bench.step checks sums and holders."""
    bench = Bench(make_shape(num_slots=2, num_pages=20), budget_tokens=4)
    ask(bench, 1, text(1, 16), 30)
    while not together and not bench.tokens(1):
        bench.step()
    ask(bench, 2, np.concatenate((text(1, 16), text(2, 4))), 5)
    bench.step(steps)
    bench.cancel(2)
    bench.step(2)
    assert bench.answers[2].finish in (Finish.CANCELLED, Finish.LENGTH)
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)
    assert run(bench, 3, np.concatenate((text(1, 16), text(2, 4)))) == 16


@pytest.mark.parametrize("eviction", ["lru", "lfu", "priority"])
def test_b008_nobody_elses_tokens(eviction: str) -> None:
    """B008: eight requests share 48 tokens, the pool evicts in every round; each answer is that of a solo run."""
    bench = Bench(make_shape(num_slots=4, num_pages=18), budget_tokens=64, eviction=eviction)
    for turn in range(70):
        for i in range(8):
            tail = np.full(8, 1000 + i if turn % 2 else 2000 + 8 * turn + i, np.int32)
            ask(bench, 8 * turn + i, np.concatenate((text(1, 48), tail)), 12, priority=i % 3)
        before = bench.engine.stats().evicted_pages_total
        bench.finish()
        assert turn < 3 or bench.engine.stats().evicted_pages_total > before
        for handle in range(8 * turn, 8 * turn + 8):
            assert bench.tokens(handle) == bench.solo(handle)


def test_b010_drop_the_stream_and_send_the_longer_turn_at_once() -> None:
    """B010: close after the first token, send prompt + partial answer + 10 tokens with no pause; twenty times."""
    bench = Bench(make_shape(num_slots=2, num_pages=60), budget_tokens=40)
    for turn in range(20):
        prompt = text(turn, 100)
        ask(bench, 2 * turn, prompt, 200)
        while not bench.tokens(2 * turn):
            bench.step()
        bench.cancel(2 * turn)
        longer = np.concatenate((prompt, bench.tokens(2 * turn), text(50, 10))).astype(np.int32)
        ask(bench, 2 * turn + 1, longer, 6)
        bench.finish()
        assert bench.tokens(2 * turn + 1) == bench.solo(2 * turn + 1)
        assert bench.answers[2 * turn + 1].cached_tokens == 96
    assert not bench.engine.step() and bench.engine.stats().live_pages == 0


def test_b011_a_preempted_sequence_finds_its_pages_again() -> None:
    """B011 with the cache: what nobody took in the meantime is not computed twice, and nothing is sent twice."""
    bench = Bench()
    bench.runner.keep_batches = True
    ask(bench, 1, text(1, 40), 60)
    bench.step(25)
    bench.preempt(1)
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)
    assert first_chunks(bench) == [0, 64], "40 tokens of the prompt and 24 of its answer"
    assert bench.answers[1].cached_tokens == 0, "its usage is that of its first admission"
    assert bench.engine.stats().prefix_query_tokens_total == 40


def test_b011_preemption_under_pressure_with_shared_prompts() -> None:
    """Several of one prompt in too few pages: who holds shared pages frees only its own."""
    for num_pages in range(8, 20):
        bench = Bench(make_shape(num_slots=6, num_pages=num_pages), budget_tokens=64)
        for handle in range(6):
            ask(bench, handle, np.concatenate((text(1, 32), text(handle, handle))), 60 + 5 * handle)
            bench.step(2)
        bench.finish()
        for handle in range(6):
            assert bench.tokens(handle) == bench.solo(handle)


def test_prompt_logprobs_are_complete_though_the_prompt_is_cached() -> None:
    bench = Bench()
    assert run(bench, 1, text(1, 60)) == 0
    assert run(bench, 2, text(1, 60), prompt_logprobs=1) == 0
    scores = bench.answers[2].prompt_logprobs
    assert scores is not None and len(scores.chosen) == 59
    assert run(bench, 3, text(1, 60), logprobs=2) == 48
    assert len(bench.answers[3].logprobs) == 4
    assert bench.engine.stats().prefix_query_tokens_total == 120


def test_a_flush_refuses_nobody_and_leaves_the_running_alone() -> None:
    bench = Bench(budget_tokens=32)
    assert run(bench, 1, text(1, 60)) == 0
    ask(bench, 2, text(1, 60), 20)
    ask(bench, 3, text(3, 100), 20)
    bench.step(2)
    bench.engine.submit([FlushCache()])
    bench.step()
    assert bench.engine.stats().cached_pages == 0
    bench.finish()
    assert bench.engine.stats().cached_pages == 0, "what they computed before and after belongs together"
    for handle in (2, 3):
        assert bench.tokens(handle) == bench.solo(handle)
    assert [run(bench, handle, text(1, 60)) for handle in (4, 5)] == [0, 48]


def test_bad_logits_leave_nothing_that_others_would_find() -> None:
    """NaN may lie in any page that no good token was sampled over; what an earlier request has proven stays."""

    def script(row: Row) -> int | np.ndarray:
        bad = row.install.seed == 2 and row.output_index == 1
        return np.full(1000, np.nan, np.float32) if bad else next_token(row.history, 1000)

    bench = Bench(script=script, budget_tokens=32)
    assert run(bench, 1, text(1, 40)) == 0
    longer = np.concatenate((text(1, 32), text(2, 60)))
    ask(bench, 2, longer, 9)
    bench.finish()
    assert bench.answers[2].finish is Finish.ERROR
    assert run(bench, 3, longer) == 80, "its first token was good: all of the prompt is proven"
    bench = Bench(script=lambda row: np.full(1000, np.nan, np.float32) if row.install.seed == 2 else 5)
    ask(bench, 1, text(1, 40))
    bench.finish()
    ask(bench, 2, longer, 9)
    bench.finish()
    ask(bench, 3, longer, 9)
    bench.finish()
    assert [bench.answers[handle].cached_tokens for handle in (1, 3)] == [0, 32]


def test_a_failed_step_empties_the_cache() -> None:
    """The device may have lost everything; the scripted one has."""
    bench = Bench(make_shape(num_slots=2))
    assert run(bench, 1, text(1, 60)) == 0
    ask(bench, 2, text(1, 60), 30)
    ask(bench, 3, text(2, 60), 30)
    ask(bench, 4, text(1, 60), 30)
    failing = bench.runner.step + 4

    def fail(step: int) -> None:
        if step == failing:
            raise RuntimeError("lost")

    bench.runner.before_result = fail
    while not bench.engine.stats().failed_steps_total:
        bench.step()
    assert bench.engine.stats().cached_pages == 0
    bench.finish()
    for handle in (2, 3, 4):
        assert bench.tokens(handle) == bench.solo(handle)


def test_a_prompt_goes_to_the_lane_that_has_its_start() -> None:
    bench = Bench(make_shape(lanes=2, num_pages=40))
    lanes = []
    for handle in range(4):
        ask(bench, handle, text(handle, 50), 20)
        bench.step()
        lanes.append(bench.engine.ledger.live[handle].lane)
        bench.finish()
    assert set(lanes) == {0, 1}
    for handle in range(4):
        ask(bench, 10 + handle, text(handle, 50), 20)
        bench.step()
        assert bench.engine.ledger.live[10 + handle].lane == lanes[handle]
        bench.finish()
        assert bench.answers[10 + handle].cached_tokens == 48


def test_b136_two_counters_give_the_true_ratio() -> None:
    """B136: ten requests that share 90 %, a cold one of one token, and many decode steps: nothing is overwritten."""
    bench = Bench(make_shape(num_pages=100))
    for handle in range(10):
        run(bench, handle, np.concatenate((text(1, 144), text(2 + handle, 16))))
    run(bench, 20, text(50, 1), 100)
    stats = bench.engine.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (1601, 9 * 144)


def test_b138_live_and_cached_pages_are_told_apart() -> None:
    """B138: 24 prompts of 33 tokens, four answered; 24 more; then the pool is filled."""
    bench = Bench(make_shape(num_pages=120))
    for start, cached in ((0, 48), (24, 96)):
        for handle in range(start, start + 24):
            ask(bench, handle, text(handle, 33))
        bench.finish()
        stats = bench.engine.stats()
        assert (stats.live_pages, stats.cached_pages, stats.free_pages) == (0, cached, 120 - cached)
    for handle in range(100, 108):
        ask(bench, handle, text(handle, 200), 40)
    most = 0
    while not bench.engine.is_idle:
        bench.step()
        stats = bench.engine.stats()
        assert stats.live_pages + stats.cached_pages + stats.free_pages == 120
        most = max(most, stats.live_pages)
    assert 100 < most <= 120 and stats.evicted_pages_total > 90


DETERMINISTIC = RuntimeConfig(decode_buckets=(8,), mixed_buckets=(64, 256), deterministic=True)


def deterministic_bench() -> Bench:
    """Prompts of at most 64 tokens run in steps of that size, others in steps of 256."""
    return Bench(make_shape(num_pages=200, max_model_len=1024), budget_tokens=256, runtime=DETERMINISTIC)


def test_a_deterministic_engine_shares_pieces_of_prompts() -> None:
    """Of 300 tokens two pieces of 128; nothing of what was decoded, and nothing of a prompt below a piece."""
    bench = deterministic_bench()
    assert run(bench, 1, text(1, 300), 200) == 0
    assert bench.engine.stats().cached_pages == 16
    assert run(bench, 2, text(1, 300)) == 256
    longer = np.concatenate((text(1, 300), bench.tokens(1))).astype(np.int32)
    assert run(bench, 3, longer) == 256, "what was decoded is rounded otherwise"
    assert run(bench, 4, text(1, 256)) == 128
    assert [run(bench, handle, text(2, 100)) for handle in (5, 6)] == [0, 0]


def test_a_deterministic_engine_shares_only_within_one_kind_of_step() -> None:
    bench = deterministic_bench()
    assert run(bench, 1, text(1, 300), prompt_logprobs=1) == 0
    assert run(bench, 2, text(1, 300)) == 0
    assert run(bench, 3, text(1, 300)) == 256
    wide = RuntimeConfig(decode_buckets=(8,), mixed_buckets=(256, 512), deterministic=True)
    bench = Bench(make_shape(num_pages=200, max_model_len=1024), budget_tokens=512, runtime=wide)
    assert run(bench, 1, text(1, 200)) == 0
    assert run(bench, 2, text(1, 500)) == 0, "its steps have another size"
    assert run(bench, 3, text(1, 250)) == 128


def test_a_deterministic_sequence_that_was_preempted_shares_its_prompt_only() -> None:
    bench = deterministic_bench()
    bench.runner.keep_batches = True
    ask(bench, 1, text(1, 200), 60)
    bench.step(40)
    bench.preempt(1)
    bench.finish()
    assert bench.tokens(1) == bench.solo(1) and first_chunks(bench) == [0, 128]
