"""The page pool: who holds which page of the cache, and when a freed page may be given away again.

Several slots may hold a page, but only the one that was given it writes to it: what is shared are whole pages that have
been written. A page that is let go while a dispatched step may still read or write it is in limbo, and held, until that
step has been collected. At all times free + live + cached = pool: live pages are held, cached ones are nodes of the
prefix cache that nobody holds, and are evicted where free ones do not suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.batch import Shape
from jaxserve.engine.prefix import NO_NODE, PrefixCache

NO_PAGES = np.zeros(0, np.int32)


def pages_for(tokens: int, page_size_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What a slot's first pages hold once collected steps have written them: what the prefix cache is told."""

    keys: Sequence[bytes]  # of those pages (see prefix.py), without the root
    token_ids: np.ndarray  # int32 [keys * K]
    proven: bool  # a token was sampled over all of them, and its logits were no NaN
    priority: int = 0


class PagePool:
    """Free pages as a stack, owned pages as block tables; all of it numpy.

    table_SM: int32 [S, M], the first owned_S[s] entries of row s are its pages in order. owned_S: int32 [S].
    cached_S: int32 [S], the first so many of them are nodes of the prefix cache; closed_S: bool [S], none of its pages
    may become one any more. ref_P: int32 [P], holders of each page: slots, and entries in limbo.
    """

    def __init__(self, shape: Shape, prefix: PrefixCache | None = None) -> None:
        self.num_pages = shape.num_pages
        self.table_SM = np.full((shape.num_slots, shape.max_pages_per_seq), shape.num_pages, np.int32)
        self.owned_S = np.zeros(shape.num_slots, np.int32)
        self.cached_S = np.zeros(shape.num_slots, np.int32)
        self.closed_S = np.zeros(shape.num_slots, bool)
        self.ref_P = np.zeros(shape.num_pages, np.int32)
        self.free_pages = shape.num_pages
        self.collected_step = 0
        self.prefix = prefix
        self._stack = np.arange(shape.num_pages - 1, -1, -1, dtype=np.int32)  # the free ones come first
        self._limbo: list[tuple[int, np.ndarray]] = []

    @property
    def cached_pages(self) -> int:
        """Pages that nobody holds and the prefix cache keeps until they are needed."""
        return 0 if self.prefix is None else self.prefix.idle_pages

    @property
    def available_pages(self) -> int:
        """Pages that can be given away now: free and cached ones."""
        return self.free_pages + self.cached_pages

    @property
    def live_pages(self) -> int:
        """Pages held by a slot or in limbo."""
        return self.num_pages - self.free_pages - self.cached_pages

    @property
    def limbo_pages(self) -> int:
        """Pages that entries in limbo hold, shared ones counted for each."""
        return sum(len(pages) for _, pages in self._limbo)

    def grow(self, slot_N: np.ndarray, count_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give each of the distinct slots `count_N` more pages; the caller made sure that enough are available.

        Returns the block table entries that changed: slot, index in its row, page; int [U] each.
        """
        pages = int(count_N.sum())
        if pages > self.free_pages:
            assert pages <= self.available_pages, (pages, self.available_pages)
            assert self.prefix is not None
            self._push(self.prefix.evict(pages - self.free_pages))
        slot_U = np.repeat(slot_N, count_N)
        before_N = np.cumsum(count_N) - count_N
        index_U = np.arange(pages) + np.repeat(self.owned_S[slot_N] - before_N, count_N)
        self.free_pages -= pages
        page_U = self._stack[self.free_pages : self.free_pages + pages].copy()
        self.table_SM[slot_U, index_U] = page_U
        self.ref_P[page_U] = 1
        self.owned_S[slot_N] += count_N.astype(np.int32)
        return slot_U, index_U, page_U

    def share(self, slot: int, nodes: np.ndarray, priority: int = 0) -> None:
        """A slot is filled: its row begins with nodes of the prefix cache, int32 [N], the first pages of a path."""
        assert not self.owned_S[slot], slot
        self.closed_S[slot] = False
        if len(nodes):
            assert self.prefix is not None
            self.table_SM[slot, : len(nodes)] = nodes
            self.owned_S[slot] = self.cached_S[slot] = len(nodes)
            self._hold(nodes)
            self.prefix.use(nodes, priority)

    def enter(self, slot: int, written: Written) -> None:
        """A slot's written pages become nodes, so that others share them at once.

        Where others wrote the same before, the slot's own copies are none, and nothing behind them is until it ends:
        it would have to hold the others' pages besides its own.
        """
        self._enter(slot, written, leaving=False)

    def _enter(self, slot: int, written: Written, leaving: bool) -> np.ndarray:
        """Returns the nodes of others that its own are below."""
        count, known = len(written.keys), int(self.cached_S[slot])
        if self.prefix is None or self.closed_S[slot] or count <= known:
            return NO_PAGES
        own = self.table_SM[slot, :count]
        there = self.prefix.path(written.keys[known:])
        depth = known + len(there)
        others = there[there != own[known:depth]]
        if len(others) and not leaving:
            return others
        if depth < count:
            parent = int(there[-1]) if len(there) else int(own[known - 1]) if known else NO_NODE
            behind = written.token_ids[depth * self.prefix.page_size_tokens :]
            self.prefix.add(written.keys[depth:], behind, own[depth:].copy(), parent, written.priority)
            self.prefix.proven_P[own[depth:]] = written.proven
        if not len(others):
            self.cached_S[slot] = count
        return others

    def prove(self, slot: int) -> None:
        """A token was sampled over all that the slot holds, and its logits were no NaN."""
        if self.prefix is not None:
            self.prefix.proven_P[self.table_SM[slot, : self.cached_S[slot]]] = True

    def distrust(self, slot: int) -> None:
        """The slot's logits were NaN, or its step failed: of what it holds only proven nodes stay in the cache."""
        if self.prefix is None:
            return
        nodes = self.table_SM[slot, : self.cached_S[slot]]
        doubtful = nodes[~self.prefix.proven_P[nodes]]
        if len(doubtful):
            self._forgotten(self.prefix.forget(int(doubtful[0])))
        self.closed_S[slot] = True

    def flush(self) -> None:
        """Empty the prefix cache. Running sequences go on; what they have written is not cached any more."""
        if self.prefix is not None:
            self._forgotten(self.prefix.clear())
            self.closed_S[:] = True

    def _forgotten(self, lost_P: np.ndarray) -> None:
        """Nodes left the tree: the idle ones are free, and who holds others adds nothing below them."""
        self._push(np.flatnonzero(lost_P & (self.ref_P == 0)).astype(np.int32))
        for slot in self.cached_S.nonzero()[0].tolist():
            if lost_P[self.table_SM[slot, : self.cached_S[slot]]].any():
                self.cached_S[slot], self.closed_S[slot] = 0, True

    def release(self, slot: int, last_step: int, written: Written | None = None) -> None:
        """Take all pages of a slot; `last_step` is the last dispatched step that may read or write them.

        What is `written` stays in the prefix cache; None: nothing but what entered before.
        """
        pages = self.table_SM[slot, : self.owned_S[slot]].copy()
        if written is not None:
            others = self._enter(slot, written, leaving=True)
            self._hold(others)  # as long as the slot's own pages below them are held
            pages = np.concatenate((pages, others))
        self.owned_S[slot] = self.cached_S[slot] = 0
        if last_step <= self.collected_step:
            self._let_go(pages)
        else:
            self._limbo.append((last_step, pages))

    def step_collected(self, step: int) -> None:
        """Step `step`, and all before it, have read and written all they will."""
        self.collected_step = step
        if self._limbo:
            ended = [pages for last_step, pages in self._limbo if last_step <= step]
            self._limbo = [entry for entry in self._limbo if entry[0] > step]
            for pages in ended:
                self._let_go(pages)

    def _hold(self, pages: np.ndarray) -> None:
        if self.prefix is not None and len(pages):
            self.prefix.hold(pages[self.ref_P[pages] == 0])
            self.ref_P[pages] += 1

    def _let_go(self, pages: np.ndarray) -> None:
        """One holder less of each of the distinct pages."""
        self.ref_P[pages] -= 1
        pages = pages[self.ref_P[pages] == 0]
        if self.prefix is not None:
            node_N = self.prefix.is_node(pages)
            self.prefix.let_go(pages[node_N])
            pages = pages[~node_N]
        self._push(pages)

    def _push(self, pages: np.ndarray) -> None:
        self._stack[self.free_pages : self.free_pages + len(pages)] = pages
        self.free_pages += len(pages)

    def held(self) -> list[np.ndarray]:
        """The pages of each slot and each entry in limbo."""
        owned = [self.table_SM[slot, :count] for slot, count in enumerate(self.owned_S)]
        return owned + [pages for _, pages in self._limbo]

    def check(self) -> None:
        """Raise AssertionError, with all numbers, unless each page is in one place and its holders are right."""
        ref_P = np.bincount(np.concatenate(self.held()), minlength=self.num_pages)
        place_P = np.bincount(self._stack[: self.free_pages], minlength=self.num_pages) + (ref_P > 0)
        if self.prefix is not None:
            self.prefix.check()
            place_P += self.prefix.idle_P
        live = int((ref_P > 0).sum())
        total = self.free_pages + live + self.cached_pages
        in_place = len(place_P) == self.num_pages and (place_P == 1).all()
        if total != self.num_pages or not in_place or (ref_P != self.ref_P).any():
            wrong = np.flatnonzero(place_P != 1)[:8].tolist()
            raise AssertionError(
                f"page sum: free {self.free_pages} + live {live} + cached {self.cached_pages} = {total}, "
                f"pool {self.num_pages}; not in exactly one place: {wrong}; with other holders than counted: "
                f"{np.flatnonzero(ref_P != self.ref_P)[:8].tolist()}"
            )


class Reclaim:
    """What giving up slots one after the other makes available: a shared page comes with the last that holds it."""

    def __init__(self, pool: PagePool, with_limbo: bool) -> None:
        """`with_limbo`: what the steps in flight will give back is there."""
        self.pages = pool.available_pages
        self._pool, self._ref_P = pool, pool.ref_P.copy()
        for _, pages in pool._limbo if with_limbo else ():
            self._drop(pages)

    def give_up(self, slots: Iterable[int]) -> int:
        """Also without these slots; returns the pages that are available then."""
        for slot in slots:
            self._drop(self._pool.table_SM[slot, : self._pool.owned_S[slot]])
        return self.pages

    def _drop(self, pages: np.ndarray) -> None:
        self._ref_P[pages] -= 1
        self.pages += int((self._ref_P[pages] == 0).sum())
