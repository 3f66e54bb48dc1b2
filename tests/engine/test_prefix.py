"""The prefix cache's tree and its pool by themselves: keys, matches, eviction, holders; and what a match costs."""

from __future__ import annotations

import time

import numpy as np
import pytest

from jaxserve.config import EVICTIONS
from jaxserve.engine.pages import PagePool, Written
from jaxserve.engine.prefix import NO_NODE, RANKS, PrefixCache, extend_keys, root_key, whole_pages
from tests.fakes.runner import make_shape

ROOT = root_key({})
PAGE = 4


def ids(*pages: int) -> np.ndarray:
    """Tokens of whole pages, each told by a number."""
    return np.repeat(np.array(pages, np.int32), PAGE)


def keys(*pages: int, root: bytes = ROOT) -> list[bytes]:
    """Their keys."""
    return extend_keys([root], ids(*pages), PAGE)


def make_cache(eviction: str = "lru") -> PrefixCache:
    """For twenty pages."""
    return PrefixCache(20, PAGE, eviction)


def add(cache: PrefixCache, path: tuple[int, ...], pages: list[int], priority: int = 0) -> None:
    """A path whose last pages are new, held from then on."""
    known = cache.path(keys(*path))
    parent = int(known[-1]) if len(known) else NO_NODE
    cache.add(keys(*path)[len(known) :], ids(*path[len(known) :]), np.array(pages, np.int32), parent, priority)


def test_b002_keys_tell_extra_keys_apart() -> None:
    """B002: names and values go in with tag and length, in any order; an empty salt is not an absent one."""
    sets = [
        {},
        {"cache_salt": ""},
        {"cache_salt": "x"},
        {"adapter": "x"},
        {"adapter": "ab", "cache_salt": ""},
        {"adapter": "a", "cache_salt": "b"},
        {"adapter": "a"},
        {"cache_salt": "b"},
        {"cache_saltb": ""},
        {"cache_salt": "\ud800"},
    ]
    assert len({root_key(extras) for extras in sets}) == len(sets)
    assert root_key({"a": "1", "b": "2"}) == root_key({"b": "2", "a": "1"})


def test_a_key_is_of_all_the_tokens_before_its_end() -> None:
    whole = keys(1, 2, 3)
    assert whole[:2] == keys(1, 2) and whole == keys(1, 2) + extend_keys([ROOT, *keys(1, 2)], ids(1, 2, 3), PAGE)
    assert whole[2] not in (keys(2, 1, 3)[2], keys(3)[0], keys(1, 2, 3, root=root_key({"cache_salt": "s"}))[2])
    assert extend_keys([ROOT], ids(1, 2)[:-1], PAGE) == keys(1), "a page that is not full has none"


@pytest.mark.parametrize(
    ("tokens", "page", "granule", "pages"), [(64, 16, 1, 4), (63, 16, 1, 3), (255, 16, 128, 8), (15, 8, 4, 1)]
)
def test_whole_pages(tokens: int, page: int, granule: int, pages: int) -> None:
    assert whole_pages(tokens, page, granule) == pages


def test_a_match_is_the_common_start() -> None:
    cache = make_cache()
    add(cache, (1, 2, 3), [7, 3, 9])
    add(cache, (1, 2, 4), [5])
    for path, pages in (((1, 2, 3), [7, 3, 9]), ((1, 2, 4, 5), [7, 3, 5]), ((1, 9), [7]), ((2, 3), []), ((), [])):
        assert cache.match(keys(*path), ids(*path)).tolist() == pages
        assert cache.depth(keys(*path)) == len(pages)
    cache.check()


def test_tokens_are_compared_where_keys_are_equal() -> None:
    """As if two pages had one hash: the match ends before the page that holds something else."""
    cache = make_cache()
    add(cache, (1, 2, 3), [7, 3, 9])
    assert cache.match(keys(1, 2, 3), ids(1, 8, 3)).tolist() == [7]
    assert cache.match(keys(1, 2, 3), ids(8, 2, 3)).tolist() == []


def test_what_is_held_is_not_evicted_and_leaves_go_first() -> None:
    cache = make_cache()
    add(cache, (1, 2, 3), [0, 1, 2])
    add(cache, (1, 4), [3])
    cache.let_go(np.array([2]))
    assert cache.evict(1).tolist() == [2] and cache.idle_pages == 0
    with pytest.raises(AssertionError, match="1, 0"):
        cache.evict(1)
    cache.let_go(np.array([0, 1, 3]))
    assert cache.evict(2).tolist() == [1, 3] and cache.evict(1).tolist() == [0]
    assert len(cache) == 0 and cache.evicted_pages == 4
    cache.check()


def used(cache: PrefixCache, page: int, times: int = 1, priority: int = 0) -> None:
    """A request takes a node and lets it go."""
    for _ in range(times):
        cache.hold(np.array([page]))
        cache.use(np.array([page]), priority)
        cache.let_go(np.array([page]))


@pytest.mark.parametrize(("eviction", "order"), [("lru", [1, 2, 0]), ("lfu", [1, 0, 2]), ("priority", [1, 2, 0])])
def test_what_goes_first(eviction: str, order: list[int]) -> None:
    """Page 2 was used most often, then 0 once and last; 0 by a request that is more important."""
    cache = make_cache(eviction)
    for page in range(3):
        add(cache, (page,), [page], priority=5)
        cache.let_go(np.array([page]))
    used(cache, 2, times=5, priority=5)
    used(cache, 0, priority=-1)
    assert cache.evict(3).tolist() == order


def test_the_rules_are_those_of_the_configuration() -> None:
    assert tuple(RANKS) == EVICTIONS


def test_a_leaf_that_is_used_again_and_again_fills_no_memory() -> None:
    cache = make_cache()
    for page in range(3):
        add(cache, (page,), [page])
        cache.let_go(np.array([page]))
    used(cache, 1, times=5000)
    assert len(cache._leaves) < 1100
    assert cache.evict(3).tolist() == [0, 2, 1]


def test_forgetting_a_node_takes_all_below_it() -> None:
    cache = make_cache()
    add(cache, (1, 2, 3), [0, 1, 2])
    add(cache, (1, 2, 5), [3])
    add(cache, (1, 6), [4])
    cache.let_go(np.array([3, 4]))
    assert np.flatnonzero(cache.forget(1)).tolist() == [1, 2, 3]
    assert cache.idle_pages == 1 and cache.path(keys(1, 2, 3)).tolist() == [0]
    cache.check()
    cache.let_go(np.array([0]))
    assert cache.evict(2).tolist() == [4, 0]


def make_pool(num_pages: int = 10) -> PagePool:
    """Pages of four tokens and four slots."""
    shape = make_shape(num_slots=4, num_pages=num_pages, page_size_tokens=PAGE)
    return PagePool(shape, PrefixCache(num_pages, PAGE))


def written(*path: int, proven: bool = True) -> Written:
    """Full pages."""
    return Written(keys(*path), ids(*path), proven)


def fill(pool: PagePool, slot: int, *path: int, more: int = 0) -> None:
    """A slot shares what it can, writes the rest of the path and has `more` pages that it does not fill."""
    shared = pool.prefix.match(keys(*path), ids(*path))
    pool.share(slot, shared)
    pool.grow(np.array([slot]), np.array([len(path) - len(shared) + more]))


def test_pages_are_shared_and_counted_once() -> None:
    pool = make_pool()
    fill(pool, 0, 1, 2, more=1)
    pool.enter(0, written(1, 2))
    fill(pool, 1, 1, 2, 3)
    assert pool.table_SM[1, :2].tolist() == pool.table_SM[0, :2].tolist()
    assert (pool.live_pages, pool.free_pages, pool.cached_pages) == (4, 6, 0)
    pool.check()
    pool.release(0, 0, written(1, 2))
    assert (pool.live_pages, pool.free_pages, pool.cached_pages) == (3, 7, 0)
    pool.release(1, 0, written(1, 2, 3))
    assert (pool.live_pages, pool.free_pages, pool.cached_pages) == (0, 7, 3)
    pool.check()


def test_a_page_is_idle_only_when_its_last_step_is_collected() -> None:
    """A step in flight may still read it: it cannot be evicted, though a new request may share it."""
    pool = make_pool()
    fill(pool, 0, 1, 2)
    pool.release(0, 7, written(1, 2))
    assert (pool.available_pages, pool.live_pages) == (8, 2)
    fill(pool, 1, 1, 2)
    pool.step_collected(7)
    assert (pool.available_pages, pool.live_pages) == (8, 2)
    pool.release(1, 7)
    assert (pool.cached_pages, pool.live_pages) == (2, 0)
    pool.check()


def test_two_who_write_the_same_keep_their_own_until_they_end() -> None:
    pool = make_pool()
    fill(pool, 0, 1, 2)
    fill(pool, 1, 1, 2, 3)
    pool.enter(0, written(1, 2))
    pool.enter(1, written(1, 2, 3))
    assert pool.cached_S.tolist() == [2, 0, 0, 0], "the second enters nothing behind pages that it does not hold"
    pool.check()
    pool.release(0, 0, written(1, 2))
    pool.release(1, 1, written(1, 2, 3))
    assert pool.cached_pages == 0, "the others' pages are held with the own one behind them"
    pool.check()
    pool.step_collected(1)
    assert (pool.cached_pages, pool.free_pages) == (3, 7)
    assert len(pool.prefix.match(keys(1, 2, 3), ids(1, 2, 3))) == 3
    pool.check()


def test_growing_evicts_what_it_needs() -> None:
    pool = make_pool(6)
    fill(pool, 0, 1, 2, 3)
    pool.release(0, 0, written(1, 2, 3))
    fill(pool, 1, 1, more=3)
    for depth in (3, 2, 1):
        assert pool.prefix.depth(keys(1, 2, 3)) == depth and pool.available_pages == depth - 1
        pool.check()
        if depth > 1:
            pool.grow(np.array([1]), np.array([1]))
    with pytest.raises(AssertionError, match="1, 0"):
        pool.grow(np.array([1]), np.array([1]))


def test_a_flush_leaves_the_running_alone_and_what_they_have_is_not_cached_again() -> None:
    pool = make_pool()
    fill(pool, 0, 1, 2)
    fill(pool, 1, 5, more=1)
    pool.enter(0, written(1, 2))
    pool.release(1, 0, written(5))
    pool.flush()
    assert (pool.cached_pages, pool.free_pages, pool.live_pages, len(pool.prefix)) == (0, 8, 2, 0)
    pool.check()
    pool.enter(0, written(1, 2))
    pool.release(0, 0, written(1, 2))
    assert (len(pool.prefix), pool.free_pages) == (0, 10)
    fill(pool, 0, 1, 2)
    pool.release(0, 0, written(1, 2))
    assert len(pool.prefix) == 2, "a later tenant of the slot is cached again"
    pool.check()


def test_distrust_drops_what_is_not_proven() -> None:
    """A slot with NaN in its logits: what another has sampled well over stays."""
    pool = make_pool()
    fill(pool, 0, 1)
    pool.enter(0, written(1, proven=False))
    pool.prove(0)
    fill(pool, 1, 1, 2, 3)
    pool.enter(1, written(1, 2, proven=False))
    fill(pool, 2, 1, 2, 4)
    pool.distrust(1)
    pool.release(1, 0)
    assert len(pool.prefix) == 1
    pool.check()
    pool.release(2, 0, written(1, 2, 4))
    assert len(pool.prefix) == 1, "it held one of them"
    pool.release(0, 0, written(1))
    assert (pool.cached_pages, pool.free_pages) == (1, 9)
    pool.check()


@pytest.mark.parametrize("damage", ["holder", "idle", "children", "key"])
def test_a_pool_that_does_not_add_up_is_noticed(damage: str) -> None:
    pool = make_pool()
    fill(pool, 0, 1, 2)
    pool.release(0, 0, written(1, 2))
    fill(pool, 1, 1)
    if damage == "holder":
        pool.ref_P[pool.table_SM[1, 0]] = 2
    elif damage == "idle":
        pool.prefix.hold(pool.prefix.path(keys(1, 2))[1:])
    elif damage == "children":
        pool.prefix.children_P[pool.table_SM[1, 0]] = 2
    else:
        pool.prefix._key[pool.table_SM[1, 0]] = None
    with pytest.raises(AssertionError, match="page sum" if damage in ("holder", "idle") else "prefix tree: "):
        pool.check()


def test_the_match_of_a_long_prompt_is_quick() -> None:
    """32,768 tokens in pages of 64: goal 300 us. The fastest tenth, whatever else the machine does."""
    tokens = np.random.default_rng(0).integers(0, 1 << 17, 32768).astype(np.int32)
    cache, path = PrefixCache(4096, 64), extend_keys([ROOT], tokens, 64)
    cache.add(path, tokens, np.random.default_rng(1).permutation(4096)[:512].astype(np.int32), NO_NODE, 0)
    times_us = []
    for _ in range(100):
        started_ns = time.perf_counter_ns()
        assert len(cache.match(path, tokens)) == 512
        times_us.append((time.perf_counter_ns() - started_ns) / 1000)
    assert sorted(times_us)[10] < 300
