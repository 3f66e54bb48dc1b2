"""A request that the device cannot bear ends alone, whoever was in its steps."""

from __future__ import annotations

import pytest

from jaxserve.config import RuntimeConfig
from jaxserve.engine.ledger import Ledger
from jaxserve.engine.pack import Packed
from jaxserve.engine.schedule import Plan
from jaxserve.engine.suspects import MOST_STRIKES
from jaxserve.request import Cancel, Finish
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import make_shape


def fails_with(bench: Bench, where: str, handle: int, outputs: int) -> None:
    """Let every step raise that the sequence is in once it has so many outputs."""
    steps, apply = set(), bench.engine._packer.apply

    def noting(plan: Plan, ledger: Ledger, step: int) -> Packed | None:
        packed = apply(plan, ledger, step)
        for one in packed.alive(ledger) if packed is not None else ():
            done = ledger.lanes[one.lane].slots.outputs.count_S[one.slot]
            if one.request.handle == handle and len(one.token_ids) - one.num_prompt_tokens + done >= outputs:
                steps.add(step)
        return packed

    def fail(step: int) -> None:
        if step in steps:
            raise RuntimeError(f"not with {handle}")

    bench.engine._packer.apply = noting
    setattr(bench.runner, where, fail)


@pytest.mark.parametrize("where", ["before_dispatch", "before_result"])
@pytest.mark.parametrize("outputs", [0, 1, 4])
@pytest.mark.parametrize(("lanes", "deterministic"), [(1, False), (2, False), (1, True)])
def test_the_guilty_ends_alone(where: str, outputs: int, lanes: int, deterministic: bool) -> None:
    bench = Bench(make_shape(num_slots=4, lanes=lanes), runtime=RuntimeConfig(deterministic=deterministic))
    fails_with(bench, where, 2, outputs)
    bench.submit(*(make_request(handle, 20 + handle, 12) for handle in range(6)))
    bench.step(3)
    bench.submit(make_request(6, 20, 12))
    bench.finish()
    assert bench.answers[2].finish is Finish.ERROR and "not with 2" in (bench.answers[2].error or "")
    assert bench.tokens(2) == bench.solo(2)[: len(bench.tokens(2))]
    for handle in (0, 1, 3, 4, 5, 6):
        assert bench.tokens(handle) == bench.solo(handle)
    assert bench.engine.stats().failed_steps_total == 2
    assert not len(bench.engine.ledger.suspects)


def test_two_guilty_ones_end_one_after_the_other() -> None:
    bench = Bench(make_shape(num_slots=4))
    fails_with(bench, "before_dispatch", 1, 2)
    fails_with(bench, "before_result", 3, 2)
    bench.submit(*(make_request(handle, 20, 12) for handle in range(4)))
    bench.finish()
    assert [bench.answers[handle].finish for handle in range(4)] == [Finish.LENGTH, Finish.ERROR] * 2
    assert bench.tokens(0) == bench.solo(0) and bench.tokens(2) == bench.solo(2)


def test_a_newcomer_waits_until_the_suspects_are_cleared() -> None:
    """Else it could be the one that fails, and a suspect beside it would end in its place."""
    bench = Bench(make_shape(num_slots=4))
    bench.submit(make_request(1, 20, 12), make_request(2, 20, 12))
    failing = [3]

    def fail(step: int) -> None:
        if step in failing:
            failing.remove(step)
            raise RuntimeError("once")

    bench.runner.before_dispatch = fail
    bench.step(3)
    bench.submit(make_request(9, 20, 12))
    while len(bench.engine.ledger.suspects):
        assert not bench.tokens(9)
        bench.step()
    bench.finish()
    for handle in (1, 2, 9):
        assert bench.tokens(handle) == bench.solo(handle)


def test_a_suspect_may_be_cancelled() -> None:
    bench = Bench(make_shape(num_slots=4))
    fails_with(bench, "before_dispatch", 2, 1)
    bench.submit(*(make_request(handle, 20, 12) for handle in range(1, 4)))
    while not len(bench.engine.ledger.suspects):
        bench.step()
    bench.submit(*(Cancel(handle, Finish.CANCELLED) for handle in (1, 2)))
    bench.finish()
    assert [bench.answers[handle].finish for handle in (1, 2, 3)] == [Finish.CANCELLED] * 2 + [Finish.LENGTH]
    assert bench.tokens(3) == bench.solo(3)


def test_failures_without_a_rule_come_to_an_end() -> None:
    bench = Bench(make_shape(num_slots=4))

    def fail(step: int) -> None:
        if not len(bench.engine.ledger.suspects) and bench.engine.stats().running_requests == 4:
            raise RuntimeError("only together")

    bench.runner.before_dispatch = fail
    bench.submit(*(make_request(handle, 20, 40) for handle in range(4)))
    bench.finish()
    assert all(answer.finish is not Finish.NONE for answer in bench.answers.values())
    assert bench.engine.stats().failed_steps_total <= MOST_STRIKES
