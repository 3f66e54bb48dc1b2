"""Data parallelism: lanes with slots and pages of their own under one program; what they must not share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxserve.batch import FLAG_LOGPROBS, FLAG_RANDOM, FLAGS_WORD, Layout, Program
from jaxserve.config import RuntimeConfig
from jaxserve.engine.sequence import MAX_PASSED
from jaxserve.request import Finish
from tests.engine.harness import Bench, make_request
from tests.engine.test_host_time import python_calls, steady_engine
from tests.fakes.runner import Row, fake_logprob, make_shape


def lane_of(bench: Bench, handle: int) -> int:
    """Where a sequence is; -1 while it waits for its first lane."""
    return bench.engine.ledger.live[handle].lane


def lane_views(bench: Bench, step: int) -> list[dict[str, np.ndarray]]:
    """The fields of each lane's vector in a step, counted from 1; the bench keeps its batches."""
    batch = bench.runner.batches[step - 1]
    layout = Layout(batch.bucket, bench.shape)
    return [layout.views(vector) for vector in batch.vector]


def programs(bench: Bench) -> list[Program]:
    """What ran, step by step."""
    return [batch.bucket.program for batch in bench.runner.batches]


def make_bench(lanes: int, budget_tokens: int = 64, **shape: int) -> Bench:
    """A bench that keeps its batches, with a decode bucket for each power of two."""
    small = make_shape(lanes=lanes, **shape)
    sizes = tuple(size for i in range(12) if (size := 1 << i) < small.num_slots)
    runtime = RuntimeConfig(decode_buckets=(*sizes, small.num_slots))
    bench = Bench(small, budget_tokens=budget_tokens, runtime=runtime)
    bench.runner.keep_batches = True
    return bench


def check_solo(bench: Bench, *handles: int) -> None:
    """These came to their ends as if each had been alone, whatever its lane."""
    for handle in handles or bench.answers:
        assert bench.tokens(handle) == bench.solo(handle), handle


def gaps(bench: Bench, handle: int) -> set[int]:
    """Iterations between a sequence's tokens."""
    return set(np.diff(bench.answers[handle].steps).tolist())


@pytest.mark.parametrize("lanes", [2, 4])
def test_eight_requests_are_spread_evenly(lanes: int) -> None:
    bench = make_bench(lanes)
    bench.submit(*(make_request(handle, 20, 30) for handle in range(8)))
    bench.step(6)
    assert Counter(lane_of(bench, handle) for handle in range(8)) == {lane: 8 // lanes for lane in range(lanes)}
    assert bench.runner.batches[-1].bucket.rows == 8 // lanes, "the bucket is for a lane's rows, not for all"
    bench.finish()
    check_solo(bench)


def test_lanes_are_balanced_by_tokens() -> None:
    """A prompt of twelve pages outweighs five of two pages; the sixth short one finds it lighter."""
    bench = make_bench(2, budget_tokens=400, max_chunks=9)
    bench.submit(make_request(0, 190, 9), *(make_request(handle, 30, 9) for handle in range(1, 9)))
    bench.step()
    assert [lane_of(bench, handle) for handle in range(9)] == [0, 1, 1, 1, 1, 1, 1, 0, 1]
    bench.finish()
    check_solo(bench)


def test_the_same_prompt_gets_the_same_tokens_in_every_lane() -> None:
    bench = make_bench(4)
    prompt = make_request(0, 40, 12).prompt_token_ids
    requests = [make_request(handle, 1, 12) for handle in range(4)]
    for request in requests:
        object.__setattr__(request, "prompt_token_ids", prompt)
    bench.submit(*requests)
    bench.step()
    assert sorted(lane_of(bench, handle) for handle in range(4)) == [0, 1, 2, 3]
    bench.finish()
    assert len({tuple(bench.tokens(handle)) for handle in range(4)}) == 1
    check_solo(bench)


def test_a_lane_with_nothing_to_run_gets_an_empty_vector() -> None:
    """But for the flags: all lanes must take the same branches."""
    bench = make_bench(2)
    bench.submit(make_request(1, 20, 4, temperature=1.0))
    bench.finish()
    assert programs(bench) == [Program.MIXED, Program.DECODE, Program.DECODE, Program.DECODE]
    for batch in bench.runner.batches:
        expected = Layout(batch.bucket, bench.shape).empty()
        expected[FLAGS_WORD] = FLAG_RANDOM
        assert np.array_equal(batch.vector[1], expected)
    assert bench.runner.devices[1].rows == [0, 0, 0, 0]
    check_solo(bench)


def test_flags_are_those_of_all_lanes() -> None:
    bench = make_bench(2)
    bench.submit(make_request(1, 20, 9, temperature=0.0), make_request(2, 20, 4, temperature=1.0, logprobs=1))
    bench.finish()
    flags = [batch.vector[:, FLAGS_WORD].tolist() for batch in bench.runner.batches]
    both = FLAG_RANDOM | FLAG_LOGPROBS
    assert flags == [[both, both]] * 4 + [[0, 0]] * 5
    assert len(bench.answers[2].logprobs) == 4 and not bench.answers[1].logprobs


def test_the_decode_bucket_takes_the_fullest_lane() -> None:
    bench = make_bench(2)
    ends = {1: 30, 2: 4, 3: 30, 4: 4, 5: 30}  # odd ones come to lane 0, even ones to lane 1
    bench.submit(*(make_request(handle, 10, tokens) for handle, tokens in ends.items()))
    bench.step(2)
    assert [lane_of(bench, handle) for handle in ends] == [0, 1, 0, 1, 0]
    bench.step(10)
    assert bench.runner.batches[-1].bucket.rows == 4 and bench.runner.devices[0].rows[-1] == 3
    assert bench.runner.devices[1].rows[-1] == 0
    bench.finish()
    check_solo(bench)


def test_decode_rows_of_one_lane_go_beside_chunks_of_another() -> None:
    bench = make_bench(2, budget_tokens=40)
    bench.submit(make_request(1, 20, 20))
    bench.step(4)
    bench.submit(make_request(2, 100, 5))
    bench.step()
    views = lane_views(bench, 5)
    assert bench.runner.batches[4].bucket.program is Program.MIXED
    assert views[0]["num_decode"].tolist() == [1] and not views[0]["chunk_tokens"].any()
    assert views[0]["token"][0] == -1 and views[0]["sample_slot"].tolist() == [0] + [8] * 7
    assert views[1]["num_decode"].tolist() == [0] and views[1]["chunk_tokens"].tolist() == [40, 0, 0, 0]
    bench.finish()
    assert gaps(bench, 1) == {1}
    check_solo(bench)


def test_each_lane_has_the_whole_budget() -> None:
    bench = make_bench(4, budget_tokens=64)
    bench.submit(*(make_request(handle, 128, 2) for handle in range(4)))
    bench.finish()
    assert programs(bench) == [Program.MIXED, Program.MIXED, Program.DECODE]
    assert all(device.rows == [64, 64, 1] for device in bench.runner.devices)
    check_solo(bench)


def test_scored_chunks_of_one_lane_go_beside_plain_ones_of_another() -> None:
    """The plain ones get no targets, and the full budget in every other step."""
    bench = make_bench(2, budget_tokens=512, num_pages=150, max_model_len=2048)
    bench.submit(make_request(1, 1000, 3, prompt_logprobs=2), make_request(2, 1500, 3))
    bench.finish()
    assert programs(bench)[:4] == [Program.SCORED, Program.MIXED, Program.SCORED, Program.MIXED]
    assert bench.runner.devices[0].rows[:4] == [256, 0, 256, 0]
    assert bench.runner.devices[1].rows[:4] == [256, 512, 256, 476]
    for step in (1, 3):
        targets = [views["target"] for views in lane_views(bench, step)]
        assert (targets[0] >= 0).all() and (targets[1] == -1).all()
    assert len(bench.answers[1].prompt_logprobs.chosen) == 999 and bench.answers[2].prompt_logprobs is None
    check_solo(bench)


@pytest.mark.parametrize("top", [0, 3])
def test_scored_prompts_of_several_lanes_get_their_own_logprobs(top: int) -> None:
    bench = make_bench(4, budget_tokens=32)
    bench.submit(*(make_request(handle, 20 + 25 * handle, 3, prompt_logprobs=top) for handle in range(4)))
    bench.step()
    assert [lane_of(bench, handle) for handle in range(4)] == [0, 1, 2, 3]
    bench.finish()
    for handle in range(4):
        prompt, scores = bench.requests[handle].prompt_token_ids, bench.answers[handle].prompt_logprobs
        expected = [np.float32(fake_logprob(prompt[:at], int(prompt[at]))) for at in range(1, len(prompt))]
        assert scores.chosen.tolist() == [float(value) for value in expected]
        assert scores.top_ids.tolist() == [list(range(token, token + top)) for token in prompt[1:]]
    check_solo(bench)


def test_rows_that_go_into_a_scored_step_run_beside_scored_chunks_of_another_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows are more than half of its four: that room is kept only where the scored chunks are."""
    monkeypatch.setattr("jaxserve.engine.buckets.SCORED_TOKENS", 4)
    bench = make_bench(2, budget_tokens=32)
    bench.submit(make_request(0, 190, 4, prompt_logprobs=1), *(make_request(handle, 2, 30) for handle in (1, 2, 3)))
    bench.finish()
    scored = [step for step, program in enumerate(programs(bench)) if program is Program.SCORED]
    assert bench.runner.devices[1].rows[10] == 3 and len(scored) >= 190 // 4
    assert all(gaps(bench, handle) == {1} for handle in (1, 2, 3))
    check_solo(bench)


def test_a_lane_with_more_rows_than_a_scored_step_takes_skips_every_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.engine.buckets.SCORED_TOKENS", 4)
    bench = make_bench(2, budget_tokens=32)
    bench.submit(make_request(0, 190, 4, prompt_logprobs=1))
    bench.submit(*(make_request(handle, 2, 40) for handle in range(1, 6)))
    bench.step(8)
    assert [lane_of(bench, handle) for handle in range(6)] == [0, 1, 1, 1, 1, 1]
    bench.submit(make_request(6, 2, 40), make_request(7, 2, 40))
    bench.finish()
    views = [lane_views(bench, step)[1] for step in range(1, len(bench.runner.batches) + 1)]
    rows = [int(part["num_decode"][0] if "num_decode" in part else (part["slot"] < 8).sum()) for part in views]
    pairs = {  # decode rows of lane 1 in a scored step and in the step before it
        (before, here)
        for before, here, program in zip(rows, rows[1:], programs(bench)[1:], strict=False)
        if program is Program.SCORED
    }
    assert {(2, 2), (5, 0), (7, 0)} <= pairs and max(here for _, here in pairs) <= 4
    assert max(max(gaps(bench, handle)) for handle in range(1, 8)) <= 2
    check_solo(bench)


def test_what_no_lane_can_hold_is_refused() -> None:
    bench = make_bench(2, num_pages=10)
    bench.submit(make_request(1, 150, 30), make_request(2, 150, 11))
    bench.step()
    assert bench.answers[1].finish is Finish.ERROR
    assert bench.answers[1].error == (
        "prompt and max_tokens: got 150 + 30 tokens, which need 12 cache pages, allowed: at most 10 pages of "
        "16 tokens, the whole pool of one of 2 data-parallel lanes"
    )
    bench.finish()
    check_solo(bench, 2)


def test_stats_are_sums_over_lanes() -> None:
    bench = make_bench(4, num_pages=20)
    bench.submit(*(make_request(handle, 20, 6) for handle in range(6)))
    bench.step(2)
    stats = bench.engine.stats()
    assert (stats.running_requests, stats.total_pages, stats.live_pages, stats.free_pages) == (6, 80, 12, 68)
    bench.finish()
    stats = bench.engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (120, 36)
    assert stats.finished_total == {"length": 6} and stats.free_pages + stats.cached_pages == 80


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("lane", "lane 0 slot 0: its sequence believes to be in lane 1 slot 0"),
        ("pages", "page sum"),
        ("free", "lane 1: slots 2 = held 1 [+] free 2"),
        ("queue", "sequences: live 2 = in slots 2 [+] waiting 1"),
    ],
)
def test_a_ledger_that_does_not_add_up_is_noticed(damage: str, words: str) -> None:
    bench = make_bench(2, num_slots=2)
    bench.submit(make_request(1, 20, 9), make_request(2, 20, 9))
    bench.step(3)
    ledger = bench.engine.ledger
    if damage == "lane":
        ledger.live[1].lane = 1
    elif damage == "pages":
        ledger.lanes[1].pool.owned_S[0] = 0
    elif damage == "free":
        ledger.lanes[1].slots.free.append(0)
    else:
        ledger.waiting.add(ledger.live[2])
    with pytest.raises(AssertionError, match=words):
        ledger.check()


def test_the_queue_is_common() -> None:
    """The long one keeps lane 0; all others go through lane 1, though they came while both were full."""
    bench = make_bench(2, num_slots=1)
    bench.submit(make_request(1, 20, 60), *(make_request(handle, 20, 4) for handle in range(2, 8)))
    bench.step()
    assert [lane_of(bench, handle) for handle in range(1, 8)] == [0, 1, -1, -1, -1, -1, -1]
    assert bench.engine.stats().waiting_requests == 5
    bench.finish()
    assert bench.answers[7].steps[-1] < bench.answers[1].steps[-1]
    check_solo(bench)


def test_preemption_in_one_lane_does_not_disturb_the_other() -> None:
    """B011 in lane 0: two of 80 tokens in six pages of 16; lane 1 has room for its one. Who goes comes back to it."""
    bench = make_bench(2, num_pages=6)
    bench.submit(make_request(1, 32, 48), make_request(2, 34, 47), make_request(3, 32, 48))
    bench.step()
    assert [lane_of(bench, handle) for handle in (1, 2, 3)] == [0, 1, 0]
    ledger, lanes = bench.engine.ledger, set()
    while not bench.engine.is_idle:
        bench.step()
        lanes.add(ledger.live[3].lane if 3 in ledger.live else 0)
    bench.finish()
    assert ledger.preemptions >= 1 and lanes == {0}
    assert gaps(bench, 2) == {1} and gaps(bench, 1) <= {1, 2} and max(gaps(bench, 3)) > 2
    assert bench.runner.counts["installs"] == 3 + ledger.preemptions
    check_solo(bench)


def test_all_lanes_fill_in_one_step() -> None:
    """As many waiting ones are looked at as a step can take: 160, where one lane would look at 64."""
    bench = make_bench(4, num_slots=40, num_pages=100, max_chunks=40)
    bench.submit(*(make_request(handle, 1, 3) for handle in range(160)))
    bench.step()
    assert bench.engine.stats().waiting_requests == 0
    bench.finish()
    check_solo(bench)


def test_a_preempted_sequence_holds_up_newcomers_of_its_lane_only() -> None:
    """B grows out of lane 0's eight pages and waits for the end of A, which holds four; C goes to lane 1 meanwhile."""
    bench = make_bench(2, num_pages=8, budget_tokens=200)
    a, b, c, d = 1, 3, 4, 2
    bench.submit(make_request(a, 50, 14), make_request(d, 82, 14), make_request(b, 60, 20))
    bench.step(8)
    ledger = bench.engine.ledger
    assert [lane_of(bench, handle) for handle in (a, b, d)] == [0, 0, 1] and ledger.live[b].slot < 0
    assert [lane.pool.available_pages for lane in ledger.lanes] == [4, 2]
    bench.submit(make_request(c, 10, 3))
    bench.step()
    assert lane_of(bench, c) == 1, "at once, and not where more pages are free"
    bench.finish()
    assert bench.engine.stats().preemptions_total == 1 and max(gaps(bench, b)) > 2
    assert gaps(bench, a) == gaps(bench, d) == {1}
    check_solo(bench)


def test_b015_a_head_that_fits_nowhere_keeps_to_one_lane_in_the_end() -> None:
    """B015 with lanes: it needs 18 of a lane's 20 pages, and small ones go on arriving for both."""
    bench = make_bench(2, num_pages=20, budget_tokens=100, max_model_len=320)
    bench.submit(make_request(0, 100, 60), make_request(1, 100, 60))
    bench.step(2)
    bench.submit(make_request(2, 18 * 16, 2))
    live, kept = bench.engine.ledger.live, None
    for handle in range(10, 400):
        bench.submit(make_request(handle, 16, 12))
        bench.step()
        if 2 in live and live[2].lane >= 0 and live[2].slot < 0:
            beside = {handle for handle, other in live.items() if other.slot >= 0 and other.lane == live[2].lane}
            assert kept is None or (beside <= kept[1] and live[2].lane == kept[0]), "pages are kept for it"
            kept = live[2].lane, beside
    assert kept is not None, "it was never passed often enough"
    bench.finish()
    first = bench.answers[2].steps[0]
    passed = [handle for handle in range(10, 400) if bench.answers[handle].steps[0] <= first]
    assert MAX_PASSED <= len(passed) and first < 100
    check_solo(bench)


@pytest.mark.parametrize("reason", [Finish.CANCELLED, Finish.DEADLINE])
def test_a_cancel_frees_its_lane_and_harms_no_other(reason: Finish) -> None:
    bench = make_bench(2, num_slots=1)
    bench.submit(make_request(1, 20, 400), make_request(2, 20, 20), make_request(3, 20, 4))
    bench.step(4)
    bench.cancel(1, reason=reason)
    bench.step(2)
    ledger = bench.engine.ledger
    assert bench.answers[1].finish is reason and ledger.lanes[0].pool.limbo_pages == 0
    assert lane_of(bench, 3) == 0
    bench.finish()
    assert gaps(bench, 2) == {1}
    check_solo(bench, 2, 3)


@pytest.mark.parametrize("where", ["before_dispatch", "before_result"])
def test_a_failed_step_of_all_lanes_ends_nobody(where: str) -> None:
    bench = make_bench(2, num_slots=2)
    bench.submit(*(make_request(handle, 20, 8) for handle in range(6)))

    def fail(step: int) -> None:
        if step == 4:
            raise RuntimeError("lost")

    setattr(bench.runner, where, fail)
    bench.finish()
    check_solo(bench, *range(6))
    assert [entry for entry in bench.runner.log if entry[0] == "recover"] == [("recover", 4 + (where[7:] == "result"))]


def test_bad_logits_in_one_lane_end_one_sequence() -> None:
    def script(row: Row) -> np.ndarray:
        logits = np.zeros(1000, np.float32)
        logits[10 + row.install.lane] = np.nan if row.install.lane == 1 and row.output_index == 1 else 1.0
        return logits

    bench = Bench(make_shape(lanes=2), script=script)
    bench.submit(make_request(1, 4, 4), make_request(2, 4, 4), make_request(3, 4, 4))
    bench.finish()
    assert [bench.tokens(handle) for handle in (1, 2, 3)] == [[10] * 4, [11], [10] * 4]
    assert bench.answers[2].finish is Finish.ERROR and "NaN" in (bench.answers[2].error or "")


def test_a_steady_step_costs_python_work_by_lane_not_by_request() -> None:
    one, few, many = steady_engine(8, 4096), steady_engine(8, 4096, lanes=4), steady_engine(64, 4096, lanes=4)
    assert python_calls(many, 20) == python_calls(few, 20) < 4 * python_calls(one, 20)
