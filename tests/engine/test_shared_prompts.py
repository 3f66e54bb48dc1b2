"""Prompts that begin alike and come together: one writes what all begin with, the others wait for it and share it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.engine.admission import WORTH_WAITING_TOKENS
from jaxserve.request import TokenRequest
from tests.engine.harness import Bench
from tests.fakes.runner import make_shape

LONG = 400  # tokens: 25 pages


def alike(handle: int, own: int = 0, shared: int = LONG, max_tokens: int = 4) -> TokenRequest:
    prompt = np.concatenate((np.arange(shared) % 900, 900 + (np.arange(own) * 7 + handle * 31) % 97))
    return TokenRequest(handle, prompt.astype(np.int32), max_tokens, seed=handle)


def check(bench: Bench) -> list[int | None]:
    """All as if alone; returns what each found in the cache."""
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in bench.answers)
    return [answer.cached_tokens for answer in bench.answers.values()]


@pytest.mark.parametrize("budget", [512, 4096])
def test_the_choices_of_one_prompt_compute_it_once(budget: int) -> None:
    """But for the last page, in which each must compute a token."""
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=budget)
    bench.submit(*(alike(handle) for handle in range(6)))
    bench.finish()
    assert check(bench) == [0] + 5 * [384]
    stats = bench.engine.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (6 * LONG, 5 * 384)


def test_where_a_prompt_takes_many_steps_they_come_in_before_its_end() -> None:
    """What is left of it is then less than they would wait for."""
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=64)
    bench.submit(*(alike(handle) for handle in range(6)))
    bench.finish()
    first, *others = check(bench)
    assert first == 0 and all(LONG - WORTH_WAITING_TOKENS - 16 <= (cached or 0) <= 384 for cached in others)


def test_what_follows_a_common_system_prompt_is_each_one_s_own() -> None:
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=512)
    bench.submit(*(alike(handle, own=50 + handle) for handle in range(5)))
    bench.finish()
    assert check(bench) == [0] + 4 * [LONG]


def test_they_wait_for_a_step_or_two_and_hold_nobody_up() -> None:
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=512)
    other = TokenRequest(9, (np.arange(60) + 300).astype(np.int32), 4, seed=9)
    bench.submit(alike(0), alike(1), other)
    bench.finish()
    first, second, third = (bench.answers[handle].steps[0] for handle in (0, 1, 9))
    assert first == third and first < second <= first + 2


def test_short_beginnings_are_not_waited_for() -> None:
    shared = WORTH_WAITING_TOKENS - 16
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=2048)
    bench.submit(*(alike(handle, own=30, shared=shared) for handle in range(3)))
    bench.finish()
    assert check(bench) == [0, 0, 0]
    assert len({answer.steps[0] for answer in bench.answers.values()}) == 1


def test_nobody_waits_for_a_writer_that_left() -> None:
    """Cancelled with its prompt half written: the next one goes on from there."""
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=128)
    bench.submit(*(alike(handle) for handle in range(3)))
    bench.step(2)
    bench.cancel(0)
    bench.finish()
    assert not bench.tokens(0)
    assert [bench.tokens(handle) == bench.solo(handle) for handle in (1, 2)] == [True, True]
    assert all((bench.answers[handle].cached_tokens or 0) >= 128 for handle in (1, 2))


def test_nobody_waits_for_what_will_not_enter_the_cache() -> None:
    """After a flush nothing that running prompts write is cached: who comes then computes its own at once."""
    for flush in (False, True):
        bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=32)
        bench.submit(alike(0, shared=480))
        bench.step(2)
        if flush:
            bench.engine.ledger.flush_cache()
        bench.submit(alike(1, shared=350))
        bench.step(2)
        assert bench.engine.ledger.lanes[0].slots.occupied == (2 if flush else 1)
        bench.finish()
        assert (check(bench)[1] == 0) == flush


def test_without_a_prefix_cache_all_compute_their_own() -> None:
    bench = Bench(make_shape(num_slots=8, num_pages=200), budget_tokens=4096, eviction=None)
    bench.submit(*(alike(handle) for handle in range(3)))
    bench.finish()
    assert check(bench) == [0, 0, 0]
    assert len({answer.steps[0] for answer in bench.answers.values()}) == 1
