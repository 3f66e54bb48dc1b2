"""The loop as its owner sees it: order of steps, ends of sequences, failures, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxserve.errors import EngineUnavailable
from jaxserve.request import EventBatch, Finish
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import Row, make_shape


def test_one_request_alone() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 6))
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)
    assert bench.answers[1].finish is Finish.LENGTH
    assert bench.answers[1].cached_tokens == 0
    assert bench.runner.counts["decode"] == 5, "a length finish is known ahead: no extra row"


def test_one_output_token_needs_no_decode_row() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 1))
    bench.finish()
    assert bench.tokens(1) == bench.solo(1) and bench.runner.counts["decode"] == 0


def test_step_n_plus_1_is_dispatched_before_step_n_is_read() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 5))
    bench.finish()
    expected = [("dispatch", 1)]
    for step in range(1, 5):
        expected += [("dispatch", step + 1), ("result", step)]
    assert bench.runner.log == [*expected, ("result", 5)]


def test_a_stop_is_seen_one_step_late_and_the_extra_token_dropped() -> None:
    bench = Bench(script=lambda row: 9 if row.output_index == 2 else 5)
    bench.submit(make_request(1, 20, 50, stop_token_ids=(9,)))
    bench.finish()
    assert bench.tokens(1) == [5, 5, 9]
    assert bench.answers[1].finish is Finish.STOP
    assert bench.runner.counts["decode"] == 3
    assert bench.engine.stats().generation_tokens_total == 3


def test_b041_only_folded_stop_ids_end_a_sequence() -> None:
    """B041: ignore_eos keeps eos id 2 out of the list; the request's own stop id 9 ends it."""
    script = lambda row: {3: 2, 6: 9}.get(row.output_index, 5)  # noqa: E731
    bench = Bench(script=script)
    bench.submit(make_request(1, 4, 10, stop_token_ids=(9,)), make_request(2, 4, 10, stop_token_ids=(1, 2)))
    bench.finish()
    assert bench.tokens(1) == [5, 5, 5, 2, 5, 5, 9] and bench.answers[1].finish is Finish.STOP
    assert bench.tokens(2) == [5, 5, 5, 2] and bench.answers[2].finish is Finish.STOP


def test_b022_stop_ids_outside_the_vocabulary_never_match() -> None:
    """B022: they are kept, and neither a token nor an unused table entry equals them."""
    bench = Bench(script=lambda row: 999)
    bench.submit(make_request(1, 4, 5, stop_token_ids=(151645, 2**31 + 999, 2**40)))
    bench.finish()
    assert bench.tokens(1) == [999] * 5 and bench.answers[1].finish is Finish.LENGTH


def test_a_stop_id_as_the_last_token_is_a_stop() -> None:
    bench = Bench(script=lambda row: 9 if row.output_index == 2 else 5)
    bench.submit(make_request(1, 4, 3, stop_token_ids=(9,)), make_request(2, 4, 1, stop_token_ids=(5,)))
    bench.finish()
    assert bench.answers[1].finish is Finish.STOP
    assert bench.tokens(2) == [5] and bench.answers[2].finish is Finish.STOP


def test_b047_more_sequences_than_slots_run_in_waves() -> None:
    """B047: nine choices on four slots, and a pool too small for nine."""
    bench = Bench(make_shape(num_slots=4, num_pages=9))
    bench.submit(*(make_request(handle, 30, 3) for handle in range(9)))
    bench.finish(200)
    for handle in range(9):
        assert bench.tokens(handle) == bench.solo(handle)


def test_bad_logits_end_one_sequence_alone() -> None:
    def script(row: Row) -> np.ndarray:
        logits = np.zeros(1000, np.float32)
        logits[row.slot + 10] = np.nan if row.install.seed == 2 and row.output_index == 1 else 1.0
        return logits

    bench = Bench(script=script)
    bench.submit(make_request(1, 4, 4), make_request(2, 4, 4))
    bench.finish()
    assert bench.answers[1].finish is Finish.LENGTH and len(bench.tokens(1)) == 4
    assert bench.answers[2].finish is Finish.ERROR and len(bench.tokens(2)) == 1
    assert "NaN" in (bench.answers[2].error or "")


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fields", "words"),
    [
        (300, 300, {}, "300 + 300 tokens, allowed: together at most 512"),
        (200, 200, {}, "need 25 cache pages, allowed: at most 20 pages of 16"),
        (0, 5, {}, "prompt: got 0 tokens"),
        (5, 0, {}, "max_tokens: got 0"),
        (5, 5, {"logprobs": 21}, "logprobs: got 21"),
        (5, 5, {"stop_token_ids": tuple(range(65))}, "65 ids"),
    ],
)
def test_b037_what_can_never_run_is_refused_at_once(
    prompt_tokens: int, max_tokens: int, fields: dict[str, object], words: str
) -> None:
    """B037, engine half: the one behind it runs."""
    bench = Bench(make_shape(num_pages=20))
    bench.submit(make_request(1, prompt_tokens, max_tokens, **fields), make_request(2, 5, 3))
    bench.step()
    assert bench.answers[1].finish is Finish.ERROR and words in (bench.answers[1].error or "")
    bench.finish()
    assert bench.tokens(2) == bench.solo(2)


def test_the_whole_pool_can_be_used_by_one() -> None:
    bench = Bench(make_shape(num_pages=5))
    bench.submit(make_request(1, 33, 80 - 33 + 1))  # 80 tokens are fed, the last one is not
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)


@pytest.mark.parametrize("where", ["before_dispatch", "before_result"])
@pytest.mark.parametrize("failing_step", [1, 2, 3, 5])
def test_a_step_that_fails_once_ends_nobody(where: str, failing_step: int) -> None:
    """The device forgets everything when it recovers: all compute again what they need, and no token comes twice."""
    bench = Bench(make_shape(num_slots=3), budget_tokens=40)
    bench.submit(make_request(1, 30, 9), make_request(2, 30, 9), make_request(3, 200, 9), make_request(4, 30, 9))

    def fail(step: int) -> None:
        if step == failing_step:
            raise RuntimeError("lost")

    setattr(bench.runner, where, fail)
    bench.finish()
    for handle in (1, 2, 3, 4):
        assert bench.tokens(handle) == bench.solo(handle)
    ahead = where == "before_result"
    assert [entry for entry in bench.runner.log if entry[0] == "recover"] == [("recover", failing_step + ahead)]
    assert bench.engine.stats().failed_steps_total == 1


def test_a_failed_first_dispatch_and_a_failed_install() -> None:
    bench = Bench()

    def refuse(step: int) -> None:
        raise RuntimeError("no memory")

    bench.runner.before_dispatch = refuse
    bench.submit(make_request(1, 20, 8))
    bench.step(2)
    assert bench.answers[1].finish is Finish.ERROR
    assert bench.answers[1].error == "step 2 failed on the device: RuntimeError: 'no memory'"
    bench.runner.before_dispatch = lambda step: None
    bench.submit(make_request(2, 20, 8))
    bench.finish()
    assert bench.tokens(2) == bench.solo(2)


def test_a_dead_runner_ends_everyone_and_tells_the_owner() -> None:
    bench = Bench(make_shape(num_slots=2))
    bench.runner.recovers = False
    bench.submit(*(make_request(handle, 20, 8) for handle in range(5)))
    bench.step(2)

    def fail(step: int) -> None:
        raise RuntimeError("gone")

    bench.runner.before_result = fail
    with pytest.raises(EngineUnavailable, match="cannot go on: step 2 failed"):
        bench.step(2)
    assert all(answer.finish is Finish.ERROR and answer.error for answer in bench.answers.values())


def test_run_serves_from_another_thread_and_ends_everyone_on_stop() -> None:
    bench = Bench()
    done, stop = threading.Event(), threading.Event()
    taken: list[EventBatch] = []

    def emit(batch: EventBatch) -> None:
        bench.take(batch)
        taken.append(batch)
        if bench.answers[1].finish is not Finish.NONE:
            done.set()

    bench.engine._emit = emit
    thread = threading.Thread(target=bench.engine.run, args=(stop,))
    bench.submit(make_request(1, 20, 6))
    thread.start()
    assert done.wait(10.0)
    bench.submit(make_request(2, 20, 400))
    while not bench.tokens(2):
        done.wait(0.001)
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert bench.tokens(1) == bench.solo(1)
    assert bench.answers[2].finish in (Finish.ERROR, Finish.LENGTH)
    with pytest.raises(EngineUnavailable, match="the engine was stopped"):
        bench.engine.submit([make_request(3, 5, 5)])


def test_run_raises_what_ended_it() -> None:
    bench = Bench()
    bench.runner.recovers = False

    def fail(step: int) -> None:
        raise RuntimeError("gone")

    bench.runner.before_dispatch = fail
    bench.submit(make_request(1, 20, 6))
    with pytest.raises(EngineUnavailable, match="gone"):
        bench.engine.run(threading.Event())
    assert bench.answers[1].finish is Finish.ERROR


def test_run_turns_its_own_faults_into_last_rows() -> None:
    bench = Bench(script=lambda row: row.nothing)  # type: ignore[attr-defined]
    bench.runner.recovers = False
    bench.submit(make_request(1, 20, 6))
    with pytest.raises(EngineUnavailable, match="AttributeError"):
        bench.engine.run(threading.Event())
    assert bench.answers[1].finish is Finish.ERROR


def test_draining_refuses_newcomers_and_finishes_the_rest() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 6))
    bench.step(2)
    bench.engine.drain()
    bench.submit(make_request(2, 20, 6))
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)
    assert bench.answers[2].finish is Finish.ERROR and "draining" in (bench.answers[2].error or "")


def test_stats_count_and_the_heart_beats() -> None:
    bench = Bench()
    assert not bench.engine.step()
    bench.clock.advance(5.0)
    assert not bench.engine.step()
    assert bench.engine.stats().heartbeat_s == 5.0
    bench.submit(make_request(1, 20, 6, arrival_s=4.5), make_request(2, 10, 2, arrival_s=5.0))
    bench.step(2)
    stats = bench.engine.stats()
    assert (stats.running_requests, stats.live_pages) == (2, 3)
    bench.finish()
    stats = bench.engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (30, 8)
    assert stats.finished_total == {"length": 2}
    assert bench.answers[1].queue_s == pytest.approx(0.5) and bench.answers[2].queue_s == 0.0
    assert stats.heartbeat_s > 5.0 and stats.device_us_per_step == pytest.approx(1000.0)
    assert stats.host_us_per_step == pytest.approx(0.0, abs=1e-3)
