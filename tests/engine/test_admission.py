"""Where a waiting sequence goes, by itself: two lanes of 3 and 5 spare pages of 16 tokens, and two free slots each."""

from __future__ import annotations

import pytest

from jaxserve.engine.admission import Limits, Prompts, offer
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.sequence import MAX_PASSED, Sequence
from tests.engine.harness import make_request

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
