"""Who goes first by each policy: order, what preempts whom, and that nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.engine import policy
from jaxserve.engine.sequence import MAX_PASSED
from jaxserve.request import Finish, TokenRequest
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import make_shape


def firsts(bench: Bench, *handles: int) -> list[int]:
    """The iterations of the first tokens."""
    return [bench.answers[handle].steps[0] for handle in handles]


def small(policy: str, slots: int = 2, pages: int = 64, **options: object) -> Bench:
    return Bench(make_shape(num_slots=slots, num_pages=pages), policy=policy, **options)


def alike(handle: int, shared: int, own: int, max_tokens: int = 2) -> TokenRequest:
    """A prompt that begins as others do."""
    prompt = np.concatenate((np.arange(shared), 500 + (np.arange(own) * 7 + handle * 131) % 400))
    return TokenRequest(handle, prompt.astype(np.int32), max_tokens, seed=handle)


def test_fcfs_keeps_the_order_of_arrival_whatever_the_priority() -> None:
    bench = small("fcfs", slots=1)
    bench.submit(*(make_request(handle, 20, 3, priority=-handle) for handle in range(4)))
    bench.finish()
    assert firsts(bench, 0, 1, 2, 3) == sorted(firsts(bench, 0, 1, 2, 3))


def test_priority_orders_the_queue_and_ties_keep_the_order_of_arrival() -> None:
    bench = small("priority", slots=1)
    bench.submit(make_request(0, 20, 3, priority=5))
    bench.submit(*(make_request(handle, 20, 3, priority=place) for handle, place in ((1, 7), (2, 6), (3, 7), (4, 6))))
    bench.finish()
    order = firsts(bench, 0, 2, 4, 1, 3)
    assert order == sorted(order) and bench.engine.stats().preemptions_total == 0


def test_an_important_request_takes_a_slot_from_the_least_important_and_latest() -> None:
    """The preempted one goes on where it was: its stream has no gap in it and nothing twice."""
    bench = small("priority", slots=3)
    bench.submit(*(make_request(handle, 20, 40, priority=place) for handle, place in ((0, 1), (1, 2), (2, 2))))
    bench.step(8)
    bench.submit(make_request(9, 20, 3, priority=1))
    bench.step(5)
    assert bench.answers[9].steps, "a slot came free for it"
    assert [handle for handle in (0, 1, 2) if bench.engine.ledger.live[handle].preemptions] == [2]
    bench.finish()
    assert bench.engine.stats().preemptions_total == 1
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in (0, 1, 2, 9))


@pytest.mark.parametrize("priority", [2, 3])
def test_equals_and_more_important_ones_are_never_preempted(priority: int) -> None:
    bench = small("priority", slots=2)
    bench.submit(make_request(0, 20, 30, priority=2), make_request(1, 20, 30, priority=1))
    bench.step(5)
    bench.submit(make_request(9, 20, 3, priority=priority))
    bench.finish()
    assert bench.engine.stats().preemptions_total == 0
    assert firsts(bench, 9)[0] > min(bench.answers[0].steps[-1], bench.answers[1].steps[-1])


def test_pages_come_from_as_few_as_suffice() -> None:
    """64 pages of 16 tokens: three sequences hold some 20 each, the newcomer needs 30."""
    bench = small("priority", slots=8, pages=64, budget_tokens=512)
    bench.submit(*(make_request(handle, 300, 100, priority=5) for handle in (0, 1, 2)))
    bench.step(6)
    bench.submit(make_request(9, 450, 20, priority=0))
    bench.step(6)
    assert bench.answers[9].steps
    preempted = [handle for handle in (0, 1, 2) if bench.engine.ledger.live[handle].preemptions]
    assert preempted == [1, 2], "the latest two: one alone gives too few"
    bench.finish()
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in (0, 1, 2, 9))


def test_what_was_freed_for_one_goes_to_nobody_else() -> None:
    """Small requests keep coming, less important than the one that waits for pages: they take none of them."""
    bench = small("priority", slots=8, pages=40, budget_tokens=256)
    bench.submit(*(make_request(handle, 250, 60, priority=5) for handle in (0, 1)))
    bench.step(4)
    bench.submit(
        make_request(50, 500, 5, priority=0), *(make_request(handle, 30, 60, priority=4) for handle in range(2, 12))
    )
    bench.step(2)
    assert [one.request.handle for one in bench.engine.ledger.lanes[0].slots.sequences if one] == [50]
    bench.step(3)
    assert bench.answers[50].steps
    bench.finish()
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in range(2, 12))


def test_a_prompt_gets_the_pages_that_it_was_promised() -> None:
    """Three rows grow into the room that was left for two while an important prompt is read: one of them leaves."""
    bench = small("priority", slots=8, pages=40, budget_tokens=200)
    bench.submit(*(make_request(handle, 30, 60, priority=4) for handle in (0, 1, 2)))
    bench.step(2)
    bench.submit(make_request(9, 506, 5, priority=0))
    bench.step(6)
    assert bench.answers[9].steps and bench.engine.stats().preemptions_total == 1
    assert bench.engine.ledger.live[2].preemptions == 1
    bench.finish()
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in (0, 1, 2, 9))


def test_nobody_is_preempted_where_it_would_not_help() -> None:
    """The newcomer needs more than the unimportant one holds: it waits for the important one, as it would anyway."""
    bench = small("priority", slots=4, pages=40, budget_tokens=512)
    bench.submit(make_request(0, 400, 40, priority=0), make_request(1, 40, 60, priority=5))
    bench.step(4)
    bench.submit(make_request(9, 480, 4, priority=1))
    bench.step(8)
    assert bench.engine.stats().preemptions_total == 0 and not bench.answers[9].steps
    bench.finish()
    assert all(bench.tokens(handle) == bench.solo(handle) for handle in (0, 1, 9))


def test_the_shortest_goes_first_and_a_long_one_ages() -> None:
    assert policy.rank("shortest-first", make_request(1, 500, 100), 0) > policy.rank(
        "shortest-first", make_request(2, 20, 5), 1
    )
    early = make_request(1, 500, 100, arrival_s=0.0)
    late = make_request(2, 20, 5, arrival_s=600 / policy.TOKENS_A_SECOND)
    assert policy.rank("shortest-first", early, 0) < policy.rank("shortest-first", late, 1)
    bench = small("shortest-first", slots=1)
    bench.submit(*(make_request(handle, tokens, 3) for handle, tokens in ((0, 100), (1, 300), (2, 200), (3, 40))))
    bench.finish()
    assert firsts(bench, 3, 0, 2, 1) == sorted(firsts(bench, 3, 0, 2, 1))


def test_the_longest_prefix_goes_first() -> None:
    bench = small("longest-prefix-match", slots=1)
    bench.submit(alike(0, 128, 8))
    bench.finish()
    bench.submit(make_request(1, 60, 2), alike(2, 40, 60), alike(3, 100, 8), alike(4, 128, 30))
    bench.finish()
    assert firsts(bench, 4, 3, 2, 1) == sorted(firsts(bench, 4, 3, 2, 1))
    assert [bench.answers[handle].cached_tokens for handle in (4, 3, 2, 1)] == [128, 96, 32, 0]


def test_who_shares_nothing_is_not_passed_for_ever() -> None:
    bench = small("longest-prefix-match", slots=1)
    bench.submit(alike(0, 128, 8))
    bench.finish()
    bench.submit(make_request(1, 60, 2))
    for handle in range(10, 10 + 3 * MAX_PASSED):
        bench.submit(alike(handle, 128, 8))
    bench.finish()
    earlier = sum(answer.steps[0] < bench.answers[1].steps[0] for answer in bench.answers.values())
    assert earlier <= MAX_PASSED + 3


@pytest.mark.parametrize("name", policy.POLICIES)
def test_everybody_ends_and_gets_what_it_would_get_alone(name: str) -> None:
    """Two lanes, too few pages, priorities and lengths at random; with and without a prefix in common."""
    rng = np.random.default_rng(5)
    bench = Bench(make_shape(num_slots=4, num_pages=24, lanes=2), policy=name, budget_tokens=96)
    handles = iter(range(1000))
    for _ in range(30):
        for _ in range(int(rng.integers(0, 5))):
            handle, tokens = next(handles), int(rng.integers(1, 250))
            options = {"priority": int(rng.integers(-2, 3)), "arrival_s": bench.clock()}
            bench.submit(make_request(handle, tokens, int(rng.integers(1, 40)), **options))
        bench.step(int(rng.integers(1, 12)))
    bench.finish()
    assert bench.engine.stats().preemptions_total > 0
    for handle, answer in bench.answers.items():
        assert answer.finish is Finish.LENGTH and bench.tokens(handle) == bench.solo(handle)
