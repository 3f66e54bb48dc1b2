"""The page pool by itself: sums, limbo, and that damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.engine.pages import PagePool
from tests.fakes.runner import make_shape


def make_pool() -> PagePool:
    """Ten pages, four slots."""
    return PagePool(make_shape(num_slots=4, num_pages=10))


def test_growing_fills_block_tables_in_order() -> None:
    pool = make_pool()
    slots, indices, pages = pool.grow(np.array([2, 0]), np.array([3, 1]))
    assert slots.tolist() == [2, 2, 2, 0] and indices.tolist() == [0, 1, 2, 0] and len(set(pages.tolist())) == 4
    slots, indices, more = pool.grow(np.array([0, 3, 2]), np.array([1, 0, 2]))
    assert slots.tolist() == [0, 2, 2] and indices.tolist() == [1, 3, 4]
    assert pool.table_SM[2, :5].tolist() == [*pages[:3], *more[1:]]
    assert pool.owned_S.tolist() == [2, 0, 5, 0] and (pool.free_pages, pool.live_pages) == (3, 7)
    pool.check()


def test_a_page_is_free_only_when_its_last_step_is_collected() -> None:
    pool = make_pool()
    pool.grow(np.array([0, 1]), np.array([4, 3]))
    pool.step_collected(5)
    pool.release(0, last_step=6)
    assert (pool.free_pages, pool.limbo_pages, pool.live_pages) == (3, 4, 7)
    pool.release(1, last_step=5)
    assert (pool.free_pages, pool.limbo_pages, pool.live_pages) == (6, 4, 4)
    pool.check()
    pool.step_collected(6)
    assert (pool.free_pages, pool.limbo_pages, pool.live_pages) == (10, 0, 0)
    pool.check()


def test_more_than_there_is_cannot_be_given() -> None:
    with pytest.raises(AssertionError, match="11, 10"):
        make_pool().grow(np.array([0, 1]), np.array([5, 6]))


@pytest.mark.parametrize("damage", ["lost", "twice", "count"])
def test_check_names_all_numbers(damage: str) -> None:
    pool = make_pool()
    pool.grow(np.array([0, 1]), np.array([2, 2]))
    if damage == "lost":
        pool.owned_S[0] = 1
    elif damage == "twice":
        pool.table_SM[0, 0] = pool.table_SM[1, 0]
    else:
        pool.free_pages -= 1
    with pytest.raises(AssertionError, match=r"free \d+ \+ live \d+ \+ cached 0 = \d+, pool 10"):
        pool.check()
