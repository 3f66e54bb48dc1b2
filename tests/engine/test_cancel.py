"""Cancels at every point of a sequence's life: harmless, one last row, pages back within two steps."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.request import Cancel, Finish
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import make_shape


@pytest.mark.parametrize("computed", [0, 2, 15, 16, 17, 19])
def test_b006_cancel_with_some_tokens_computed(computed: int) -> None:
    """B006 without the prefix cache: R1 lives on, R2 (20 tokens) is cancelled in the middle of its prefill.

    The smallest chunk beside a decoding row is 2 tokens, as the budget is more than the slots.
    """
    bench = Bench(make_shape(num_slots=1 + (computed > 0), num_pages=20), budget_tokens=max(3, computed + 1))
    bench.submit(make_request(1, 16, 30))
    while not bench.tokens(1):
        bench.step()
    bench.submit(make_request(2, 20, 5))
    if computed:
        bench.step()
        assert int(bench.engine.ledger.lanes[0].slots.computed_S[bench.engine.ledger.live[2].slot]) == computed
    bench.cancel(2)
    bench.step(2)
    assert bench.answers[2].finish is Finish.CANCELLED and bench.tokens(2) == []
    assert bench.engine.ledger.lanes[0].pool.limbo_pages == 0
    bench.finish()
    assert bench.tokens(1) == bench.solo(1)


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("reason", [Finish.CANCELLED, Finish.DEADLINE, Finish.STOP])
def test_b081_cancel_at_any_step(steps: int, reason: Finish) -> None:
    """B081: queued, in prefill, running, in flight, or finished; gone within two steps either way."""
    bench = Bench(make_shape(num_slots=2), budget_tokens=16)
    bench.submit(*(make_request(handle, 40, 400 if handle < 3 else 4) for handle in (1, 2, 3)))
    bench.step(steps)
    bench.cancel(1, 2, reason=reason)
    bench.step()
    for handle in (1, 2):
        assert bench.answers[handle].finish is reason
        assert bench.tokens(handle) == bench.solo(handle)[: len(bench.tokens(handle))]
    bench.step()
    ledger = bench.engine.ledger
    assert set(ledger.live) == {3} and ledger.lanes[0].pool.limbo_pages == 0
    bench.finish()
    assert bench.tokens(3) == bench.solo(3)


def test_unknown_finished_and_repeated_cancels_are_harmless() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 3))
    bench.cancel(77, 1, 1, 1)
    bench.submit(make_request(2, 20, 3))
    bench.finish()
    bench.cancel(1, 2, 2)
    bench.step(3)
    assert bench.answers[1].finish is Finish.CANCELLED and bench.answers[2].finish is Finish.LENGTH
    assert bench.tokens(2) == bench.solo(2)
    assert bench.engine.stats().finished_total == {"cancelled": 1, "length": 1}


def test_a_cancel_behind_its_request_in_one_list() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 3))
    bench.engine.submit([Cancel(1, Finish.DEADLINE)])
    bench.step()
    assert bench.answers[1].finish is Finish.DEADLINE
    assert not bench.runner.log, "nothing was dispatched for it"
    bench.finish()


@pytest.mark.parametrize("where", ["before_dispatch", "before_result"])
def test_a_cancel_inside_a_step(where: str) -> None:
    """It comes while the step is dispatched or awaited, from the front's thread; taken in with the next one."""
    bench = Bench()
    bench.submit(make_request(1, 20, 50), make_request(2, 20, 12))
    setattr(bench.runner, where, lambda step: bench.cancel(1) if step == 4 else None)
    bench.finish()
    assert bench.answers[1].finish is Finish.CANCELLED and len(bench.tokens(1)) in (3, 4)
    assert bench.tokens(2) == bench.solo(2)


def test_a_cancelled_slot_and_its_pages_are_reused_at_once() -> None:
    bench = Bench(make_shape(num_slots=1, num_pages=4))
    bench.submit(make_request(1, 40, 20), make_request(2, 40, 20))
    bench.step(3)
    bench.cancel(1)
    bench.step(3)
    assert bench.engine.ledger.live[2].slot == 0
    bench.finish()
    assert bench.tokens(2) == bench.solo(2)


def test_a_preempted_sequence_on_its_way_out_is_cancelled() -> None:
    bench = Bench()
    bench.submit(make_request(1, 20, 50))
    bench.step(3)
    bench.preempt(1)
    bench.cancel(1)
    bench.step()
    assert bench.answers[1].finish is Finish.CANCELLED
    bench.finish()


def test_b085_storm_of_short_lives() -> None:
    """B085: cancels that race with completion, one output token each, several a tick."""
    bench = Bench(make_shape(num_slots=8, num_pages=24), budget_tokens=64)
    random = np.random.default_rng(0)
    pending: list[tuple[int, int]] = []
    for handle in range(400):
        bench.submit(make_request(handle, int(random.integers(1, 40)), int(random.integers(1, 3))))
        pending.append((bench.iterations + int(random.integers(0, 5)), handle))
        if handle % 3 == 0:
            bench.step()
        due = [handle for at, handle in pending if at <= bench.iterations]
        pending = [entry for entry in pending if entry[0] > bench.iterations]
        bench.cancel(*due, reason=Finish.DEADLINE)
    bench.finish()
    for handle, answer in bench.answers.items():
        assert answer.token_ids == bench.solo(handle)[: len(answer.token_ids)]
    reasons = {answer.finish for answer in bench.answers.values()}
    assert reasons == {Finish.DEADLINE, Finish.LENGTH}
