"""Who runs when: fairness, admission by pages, preemption. Steps are counted on the scripted runner."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.batch import Bucket, Layout, Program
from jaxserve.config import RuntimeConfig
from jaxserve.engine.admission import Candidate
from jaxserve.engine.schedule import View, schedule, share_budget
from jaxserve.engine.sequence import MAX_PASSED, Sequence
from jaxserve.engine.suspects import Suspects
from jaxserve.request import Finish
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import make_shape


def gaps(steps: list[int]) -> list[int]:
    """Iterations between tokens."""
    return [after - before for before, after in zip(steps[:-1], steps[1:], strict=True)]


def test_b013_a_long_prompt_freezes_nobody() -> None:
    """B013: A decodes on, C's 20 tokens do not wait for B's 8,192, and B is hardly later."""

    def first_token_of_b(with_c: bool) -> int:
        bench = Bench(make_shape(num_pages=1200, max_model_len=9000), budget_tokens=257)
        bench.submit(make_request(1, 10, 200))
        bench.step(3)
        bench.submit(make_request(2, 8192, 1))
        bench.step(3)
        if with_c:
            bench.submit(make_request(3, 20, 4))
        bench.finish()
        assert max(gaps(bench.answers[1].steps)) <= 2
        if with_c:
            assert bench.answers[3].steps[0] <= 9
            assert bench.tokens(3) == bench.solo(3)
        return bench.answers[2].steps[0]

    alone = first_token_of_b(with_c=False)
    assert first_token_of_b(with_c=True) <= alone + 1


def test_several_long_prompts_share_and_short_ones_pass() -> None:
    bench = Bench(make_shape(num_pages=1200, max_model_len=4096), budget_tokens=128)
    bench.submit(*(make_request(handle, 2000, 2) for handle in (1, 2, 3)))
    for handle in range(10, 20):
        bench.step(4)
        bench.submit(make_request(handle, 30, 2))
    bench.finish()
    for handle in range(10, 20):
        steps = bench.answers[handle].steps
        assert steps[0] <= 4 * (handle - 9) + 3, (handle, steps)
    firsts = [bench.answers[handle].steps[0] for handle in (1, 2, 3)]
    assert firsts == sorted(firsts) and firsts[0] <= 36, "half of 128 tokens is always the oldest prompt's"


@pytest.mark.parametrize(
    ("remaining", "budget", "chunks", "given"),
    [
        ([100], 64, 4, [64]),
        ([100, 100], 64, 4, [64, 0]),  # the oldest is also the shortest once its half is counted
        ([100, 10], 64, 4, [54, 10]),
        ([500, 400, 300], 64, 4, [32, 0, 32]),
        ([500, 20, 20], 64, 4, [32, 20, 12]),
        ([10, 10, 10], 64, 2, [10, 10, 0]),
        ([500, 20, 20], 64, 1, [64, 0, 0]),
        ([5], 0, 4, [0]),
    ],
)
def test_budget_shares(remaining: list[int], budget: int, chunks: int, given: list[int]) -> None:
    candidates = [
        Candidate(Sequence.of(make_request(i, tokens, 1), (0, i)), i, 0, tokens, 0)
        for i, tokens in enumerate(remaining)
    ]
    share_budget(candidates, 10_000, 8)  # what an earlier try gave does not count
    share_budget(candidates, budget, chunks)
    assert [candidate.tokens for candidate in candidates] == given


def test_budget_and_chunk_limits_hold_in_every_step() -> None:
    runtime = RuntimeConfig(decode_buckets=(1, 2, 4, 8), mixed_buckets=(16, 48))
    bench = Bench(make_shape(num_slots=8, num_pages=200, max_chunks=3), budget_tokens=48, runtime=runtime)
    bench.runner.keep_batches = True
    bench.submit(*(make_request(handle, 5 + 9 * handle, 20) for handle in range(12)))
    bench.finish()
    sizes = set()
    for batch in bench.runner.batches:
        views = Layout(batch.bucket, bench.shape).views(batch.vector[0])
        live = int((views["slot"] < 8).sum())
        sizes.add(batch.bucket.rows)
        assert live <= 48
        if batch.bucket.program is Program.DECODE:
            assert batch.bucket.rows < 2 * live or batch.bucket.rows == 1, "the smallest bucket that fits"
        else:
            assert batch.bucket.rows == (16 if live <= 16 else 48)
            assert 1 <= (views["chunk_tokens"] > 0).sum() <= 3
    assert sizes == {1, 2, 4, 8, 16, 48}


def test_b015_small_ones_pass_a_head_that_does_not_fit() -> None:
    """B015: 50 free pages of 80; H needs 60, L1 and L2 two each."""
    bench = Bench(make_shape(num_pages=80, max_model_len=1280), budget_tokens=1000)
    bench.submit(make_request(1, 29 * 16 + 10, 60))  # 30 pages from its start on, a few more later
    bench.step(2)
    assert bench.engine.stats().free_pages == 50
    bench.submit(make_request(2, 59 * 16 + 10, 2), make_request(3, 20, 4), make_request(4, 20, 4))
    bench.step(3)
    assert bench.tokens(3) and bench.tokens(4) and not bench.tokens(2)
    bench.finish()
    for handle in range(1, 5):
        assert bench.tokens(handle) == bench.solo(handle)


def test_b015_the_head_is_not_passed_for_ever() -> None:
    """B015: small ones arrive in each step; after MAX_PASSED of them pages are kept for the head."""
    bench = Bench(make_shape(num_pages=20, max_model_len=320), budget_tokens=100)
    bench.submit(make_request(1, 100, 150))
    bench.step(2)
    bench.submit(make_request(2, 18 * 16, 2))
    for handle in range(10, 400):
        bench.submit(make_request(handle, 16, 12))
        bench.step()
    bench.finish()
    first = bench.answers[2].steps[0]
    passed = [handle for handle in range(10, 400) if bench.answers[handle].steps[0] <= first]
    assert len(passed) <= MAX_PASSED + 1
    assert bench.tokens(2) == bench.solo(2)


@pytest.mark.parametrize("num_pages", [6, 7])
def test_b011_preemption_loses_and_repeats_nothing(num_pages: int) -> None:
    """B011: two 32-token prompts with 48 outputs each in 6 pages of 16."""
    bench = Bench(make_shape(num_pages=num_pages))
    bench.submit(make_request(1, 32, 48), make_request(2, 32, 48))
    bench.finish()
    stats = bench.engine.stats()
    assert stats.preemptions_total >= 1
    for handle in (1, 2):
        assert bench.tokens(handle) == bench.solo(handle)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (64, 96)


def test_b011_a_request_can_be_preempted_twice() -> None:
    bench = Bench(make_shape(num_pages=6))
    bench.submit(make_request(1, 16, 30))
    bench.step(2)
    bench.submit(make_request(2, 16, 60))
    bench.step(2)
    for _ in range(2):
        bench.preempt(2)
        bench.step(12)
    bench.finish()
    assert bench.engine.ledger.preemptions >= 2
    for handle in (1, 2):
        assert bench.tokens(handle) == bench.solo(handle)


def test_a_token_in_flight_of_a_preempted_sequence_is_kept() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 6))
    bench.step(3)
    assert len(bench.tokens(1)) == 2
    bench.preempt(1)
    bench.step()
    assert len(bench.tokens(1)) == 3, "collected, though the sequence is on its way out"
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)
    installs = bench.runner.counts["installs"]
    assert installs == 2


def test_a_preempted_sequence_that_ends_in_flight_is_done() -> None:
    bench = Bench(script=lambda row: 9 if row.output_index == 2 else 5)
    bench.submit(make_request(1, 20, 6, stop_token_ids=(9,)))
    bench.step(3)
    bench.preempt(1)
    bench.step()
    assert bench.answers[1].finish is Finish.STOP and bench.tokens(1) == [5, 5, 9]
    bench.finish()


def test_b019_a_preempted_sequence_keeps_its_place() -> None:
    """B019: fresh one-page requests arrive in every step; A comes back before those that arrived after it.

    The older sequence grows until A must go; what A leaves is enough for the fresh ones and not for A.
    """
    bench = Bench(make_shape(num_slots=8, num_pages=20), budget_tokens=400)
    bench.submit(make_request(1, 190, 120))
    bench.step(2)
    bench.submit(make_request(2, 100, 60))
    bench.step(5)
    ledger = bench.engine.ledger
    assert ledger.preemptions == 0
    gone = None
    for handle in range(10, 110):
        bench.step()
        bench.submit(make_request(handle, 10, 4))
        if ledger.preemptions and gone is None and not ledger.lanes[0].slots.leaving:
            gone = handle
            assert ledger.live[2].slot < 0 and ledger.lanes[0].pool.available_pages >= 4
    assert gone is not None, "A was never preempted"
    most = 0
    while not bench.engine.is_idle:
        bench.step()
        sequence = ledger.live.get(2)
        most = max(most, sequence.preemptions if sequence else 0)
    assert most <= 2
    steps = bench.answers[2].steps
    resumed = next(step for step, gap in zip(steps[1:], gaps(steps), strict=True) if gap > 2)
    late = [handle for handle in range(gone, 110) if bench.answers[handle].steps[0] < resumed]
    assert late == [], "these arrived after A was preempted and ran before it came back"
    for handle in bench.answers:
        assert bench.tokens(handle) == bench.solo(handle)


def test_pages_that_come_back_anyway_save_a_preemption() -> None:
    """The older one needs a page in the very step before which the other's last token went out."""
    bench = Bench(make_shape(num_pages=4, page_size_tokens=8))
    bench.submit(make_request(1, 9, 20), make_request(2, 9, 8))
    bench.finish()
    assert bench.engine.stats().preemptions_total == 0
    assert max(gaps(bench.answers[1].steps)) == 2, "it did wait for the page"


def test_preemption_takes_the_latest_arrival() -> None:
    bench = Bench(make_shape(num_pages=9))
    bench.submit(make_request(1, 30, 60), make_request(2, 30, 60), make_request(3, 30, 60))
    bench.finish()
    ends = [bench.answers[handle].steps[-1] for handle in (1, 2, 3)]
    assert ends == sorted(ends)
    assert max(gaps(bench.answers[1].steps)) <= 2, "the oldest waits one step for a page at most"
    for handle in (1, 2, 3):
        assert bench.tokens(handle) == bench.solo(handle)


def test_updates_of_a_long_resume_fit_their_bucket() -> None:
    """A resumed sequence asks for its pages chunk by chunk: the layout's U always suffices (packing asserts it)."""
    bench = Bench(make_shape(num_slots=4, num_pages=60, page_size_tokens=8, max_chunks=1), budget_tokens=16)
    bench.submit(make_request(1, 300, 60))
    bench.step(40)
    bench.preempt(1)
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)


def test_scored_prompts_take_turns_with_others() -> None:
    bench = Bench(make_shape(num_slots=8, num_pages=300, max_model_len=2000), budget_tokens=64)
    bench.submit(make_request(1, 10, 100), make_request(2, 600, 2, prompt_logprobs=0), make_request(3, 600, 2))
    bench.finish()
    assert max(gaps(bench.answers[1].steps)) <= 2
    counts = bench.runner.counts
    assert counts["scored"] >= 10 and counts["mixed"] >= 10
    for handle in (1, 2, 3):
        assert bench.tokens(handle) == bench.solo(handle)
    assert abs(bench.answers[2].steps[0] - bench.answers[3].steps[0]) <= 4


def test_a_scored_prompt_that_gets_no_page_takes_nobodys_step() -> None:
    """Pages are promised to an admitted prompt, but decode rows may have been faster."""
    bench = Bench(make_shape(num_pages=20), budget_tokens=32)
    bench.submit(make_request(1, 10, 20), make_request(2, 100, 2, prompt_logprobs=0))
    bench.step(2)
    lane, waiting = bench.engine.ledger.lanes[0], bench.engine.ledger.waiting
    assert lane.slots.prefilling and lane.slots.decoding_S.any()
    free_pages, lane.pool.free_pages = lane.pool.free_pages, 0
    plan = schedule(View(bench.engine._limits, (lane,), waiting, Suspects(), last_was_scored=False))
    assert plan.bucket == Bucket(Program.DECODE, 8) and not plan.lanes[0].chunks
    lane.pool.free_pages = free_pages
    bench.finish()


def test_scored_chunks_find_room_where_decode_rows_would_fill_their_bucket() -> None:
    bench = Bench(make_shape(num_slots=280, num_pages=1300, max_chunks=96), budget_tokens=600)
    bench.submit(*(make_request(handle, 2, 60) for handle in range(270)))
    bench.step(5)
    assert int(bench.engine.ledger.lanes[0].slots.decoding_S.sum()) > 256
    bench.submit(make_request(1000, 300, 2, prompt_logprobs=0))
    bench.finish()
    assert len(bench.answers[1000].prompt_logprobs.chosen) == 299
    assert bench.answers[1000].steps[0] < 15, "beside them, not after them"
    assert max(gap for handle in range(270) for gap in gaps(bench.answers[handle].steps)) <= 2


def test_a_sequence_that_resumes_is_older_than_those_admitted_meanwhile() -> None:
    bench = Bench(make_shape(num_pages=200, max_model_len=1600), budget_tokens=64)
    bench.submit(make_request(1, 640, 4))
    bench.step(2)
    bench.submit(make_request(2, 640, 4), make_request(3, 600, 4))
    bench.step(2)
    bench.preempt(1)
    bench.finish()
    firsts = [bench.answers[handle].steps[0] for handle in (1, 2, 3)]
    assert firsts[0] <= 2 + 2 + 1 + 640 // 32 + 1, "it has half of the budget again"
    for handle in (1, 2, 3):
        assert bench.tokens(handle) == bench.solo(handle)


def test_admission_leaves_decoding_rows_a_page_to_grow_into() -> None:
    """Without it the newcomer takes the last pages and is preempted as soon as the older one needs its next."""
    bench = Bench(make_shape(num_pages=10, page_size_tokens=8))
    bench.submit(make_request(1, 16, 40))
    bench.step(3)
    assert bench.engine.stats().free_pages == 7
    bench.submit(make_request(2, 55, 20))
    bench.finish()
    assert bench.engine.stats().preemptions_total == 0
    for handle in (1, 2):
        assert bench.tokens(handle) == bench.solo(handle)


def test_scored_prompts_advance_beside_more_decode_rows_than_their_bucket_takes() -> None:
    bench = Bench(make_shape(num_slots=40, num_pages=300), budget_tokens=64)
    bench.submit(*(make_request(handle, 4, 60) for handle in range(39)))
    bench.step(5)
    bench.submit(make_request(100, 200, 2, prompt_logprobs=1))
    bench.finish()
    assert max(gap for handle in range(39) for gap in gaps(bench.answers[handle].steps)) <= 2
    assert np.isfinite(bench.answers[100].prompt_logprobs.chosen).all()
    assert len(bench.answers[100].prompt_logprobs.chosen) == 199
