"""Where a waiting sequence goes, by itself: two lanes of 3 and 5 spare pages of 16 tokens, and two free slots each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine.admission import AFFINITY, Limits, Prompts, offer
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import PagePool, Written
from jaxserve.engine.prefix import PrefixCache, extend_keys, root_key
from jaxserve.engine.schedule import choose_victims
from jaxserve.engine.sequence import MAX_PASSED, Sequence
from tests.engine.harness import make_request
from tests.fakes.runner import make_shape

LIMITS = Limits(64, 4, 16, 20, Buckets((8,), (64,), 64))


def make_lanes() -> list[Prompts]:
    """The two lanes."""
    return [Prompts([], spare_pages=3, free_slots=2), Prompts([], spare_pages=5, free_slots=2)]


def make_waiting(arrival: int, tokens: int, lane: int = -1, preempted: bool = False, passed: int = 0) -> Sequence:
    """A waiting sequence."""
    sequence = Sequence.of(make_request(arrival, tokens, 9), (0, arrival))
    sequence.lane, sequence.preemptions, sequence.passed = lane, int(preempted), passed
    return sequence


def placed(lanes: list[Prompts]) -> list[list[int]]:
    """Arrivals of the admitted, by lane."""
    return [[candidate.sequence.rank[1] for candidate in lane.candidates] for lane in lanes]


def offer_all(lanes: list[Prompts], *sequences: Sequence) -> int:
    """Offer them in order until one says that nobody behind it is looked at; returns how many were."""
    for count, sequence in enumerate(sequences, 1):
        if not offer(sequence, LIMITS, lanes):
            return count
    return len(sequences)


def test_newcomers_go_where_most_pages_are_spare() -> None:
    """Each takes a page: two go to lane 1, which then has no slot; two to lane 0; the fifth finds none."""
    lanes = make_lanes()
    assert offer_all(lanes, *(make_waiting(arrival, 10) for arrival in range(6))) == 5
    assert placed(lanes) == [[2, 3], [0, 1]]
    assert [lane.spare_pages for lane in lanes] == [1, 3]


def test_one_that_fits_nowhere_is_passed_by_smaller_ones() -> None:
    lanes = make_lanes()
    big, small = make_waiting(0, 80), make_waiting(1, 60)  # 6 pages, 4 pages
    assert offer_all(lanes, big, small, big) == 3
    assert placed(lanes) == [[], [1]]
    assert [lane.passed for lane in lanes] == [[big], [big]], "where most is spare at that moment"


def test_a_preempted_one_returns_to_its_lane_and_nobody_follows_it_there() -> None:
    """But for others that were preempted."""
    lanes = make_lanes()
    back, other = make_waiting(0, 10, lane=1, preempted=True), make_waiting(3, 10, lane=1, preempted=True)
    newcomers = [make_waiting(arrival, 10) for arrival in (1, 2, 4)]
    assert offer_all(lanes, back, newcomers[0], newcomers[1], other, newcomers[2], other) == 5
    assert placed(lanes) == [[1, 2], [0, 3]]


@pytest.mark.parametrize("full_lane", [0, 1])
def test_a_lane_is_kept_for_a_preempted_one_that_does_not_fit(full_lane: int) -> None:
    """No newcomer goes there, however much is spare; a later one of that lane waits behind it and stops nobody."""
    lanes = make_lanes()
    back = make_waiting(0, 100, lane=full_lane, preempted=True)
    second = make_waiting(1, 10, lane=full_lane, preempted=True)
    assert offer_all(lanes, back, second, *(make_waiting(arrival, 10) for arrival in (2, 3, 4, 5))) == 5
    assert placed(lanes)[full_lane] == [] and placed(lanes)[1 - full_lane] == [2, 3]
    assert lanes[full_lane].passed == [back]
    assert not offer(second, LIMITS, lanes), "now no lane has a slot for anyone"


def test_when_every_lane_is_kept_nobody_else_is_looked_at() -> None:
    lanes = make_lanes()
    sequences = [make_waiting(lane, 100, lane=lane, preempted=True) for lane in (0, 1)]
    assert offer_all(lanes, *sequences, make_waiting(2, 10)) == 2


def test_one_that_was_passed_too_often_keeps_the_lane_in_which_it_is_tried() -> None:
    lanes = make_lanes()
    big = make_waiting(0, 80, passed=MAX_PASSED)
    assert offer_all(lanes, big, *(make_waiting(arrival, 10) for arrival in (1, 2, 3))) == 4
    assert placed(lanes) == [[1, 2], []] and lanes[1].passed == [big]


def keyed(arrival: int, tokens: int) -> Sequence:
    """A waiting sequence with the keys of its prompt, which is the same for all arrivals."""
    sequence = make_waiting(arrival, tokens)
    sequence.token_ids = np.arange(tokens, dtype=np.int32)
    root = root_key({})
    sequence.keys = [root, *extend_keys([root], sequence.token_ids, 16)]
    return sequence


def make_pool(cached_pages: int, num_pages: int = 20) -> PagePool:
    """Slot 0 has written, and still holds, that much of everybody's prompt."""
    pool = PagePool(make_shape(num_slots=4, num_pages=num_pages), PrefixCache(num_pages, 16))
    if cached_pages:
        pool.grow(np.array([0]), np.array([cached_pages]))
        sequence = keyed(0, 16 * cached_pages)
        pool.enter(0, Written(sequence.keys[1:], sequence.token_ids, proven=True))
    return pool


@pytest.mark.parametrize(("is_reclaiming", "admitted"), [(False, True), (True, False)])
def test_shared_pages_count_as_held_unless_their_holder_may_be_going(is_reclaiming: bool, admitted: bool) -> None:
    """Three pages are needed, one is spare, two are shared. Who is preempted in this step may be all who holds them."""
    lane = Prompts([], spare_pages=1, free_slots=2, pool=make_pool(2), is_reclaiming=is_reclaiming)
    assert offer(keyed(1, 40), LIMITS, [lane])
    assert placed([lane]) == [[1] if admitted else []]
    if admitted:
        (candidate,) = lane.candidates
        assert (candidate.start, candidate.remaining, candidate.owned, lane.spare_pages) == (32, 8, 2, 0)


def test_shared_pages_that_nobody_holds_are_taken_from_what_is_spare() -> None:
    pool = make_pool(2)
    pool.release(0, 0)
    for spare_pages, admitted in ((2, []), (3, [1])):
        lane = Prompts([], spare_pages, free_slots=2, pool=pool)
        offer(keyed(1, 40), LIMITS, [lane])
        assert placed([lane]) == [admitted]


@pytest.mark.parametrize(("behind_pages", "lane"), [(2 * AFFINITY - 1, 0), (2 * AFFINITY + 1, 1)])
def test_a_prompt_goes_where_its_pages_are_unless_another_lane_has_much_more_left(behind_pages: int, lane: int) -> None:
    lanes = [Prompts([], 5, 2, pool=make_pool(2)), Prompts([], 5 + behind_pages, 2, pool=make_pool(0))]
    offer(keyed(1, 40), LIMITS, lanes)
    assert placed(lanes)[lane] == [1]


def test_a_lane_without_room_is_passed_over_though_it_has_the_prompts_pages() -> None:
    lanes = [Prompts([], 0, 2, pool=make_pool(2)), Prompts([], 3, 2, pool=make_pool(0))]
    offer(keyed(1, 40), LIMITS, lanes)
    assert placed(lanes) == [[], [1]]


def test_only_whole_granules_are_shared_where_the_engine_is_deterministic() -> None:
    lane = Prompts([], 20, 2, pool=make_pool(9))
    offer(keyed(1, 160), replace(LIMITS, deterministic=True), [lane])
    assert [candidate.start for candidate in lane.candidates] == [128]


def test_a_victim_gives_only_what_it_alone_holds() -> None:
    """Four sequences share eight pages and have one each; all need another. Two go, so that two can stay."""
    lane = Lane(0, make_shape(num_slots=4, num_pages=12), "lru")
    written = keyed(0, 128)
    for slot in range(4):
        nodes = lane.pool.prefix.path(written.keys[1:])
        lane.pool.share(slot, nodes)
        lane.pool.grow(np.array([slot]), np.array([9 - len(nodes)]))
        lane.pool.enter(slot, Written(written.keys[1:], written.token_ids, proven=True))
        lane.slots.fill(slot, make_waiting(slot, 144))
        lane.slots.prefilling.pop(slot)
        lane.slots.decoding_S[slot] = True
    lane.pool.check()
    assert lane.pool.available_pages == 0
    assert choose_victims(lane, {0, 1, 2, 3}) == [3, 2]
