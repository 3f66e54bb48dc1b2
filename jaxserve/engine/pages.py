"""The page pool: who owns which page of the cache, and when a freed page may be given away again.

A page that a request gives back while a dispatched step may still write it is in limbo: it is free only once that step
has been collected. At all times free + live + cached = pool, where limbo counts as live.
"""

from __future__ import annotations

import numpy as np

from jaxserve.batch import Shape


def pages_for(tokens: int, page_size_tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size_tokens)


class PagePool:
    """Free pages as a stack, owned pages as block tables; all of it numpy.

    table_SM: int32 [S, M], the first owned_S[s] entries of row s are its pages in order. owned_S: int32 [S].
    """

    def __init__(self, shape: Shape) -> None:
        self.num_pages = shape.num_pages
        self.table_SM = np.full((shape.num_slots, shape.max_pages_per_seq), shape.num_pages, np.int32)
        self.owned_S = np.zeros(shape.num_slots, np.int32)
        self.free_pages = shape.num_pages
        self.limbo_pages = 0
        self.cached_pages = 0  # unreferenced pages that the prefix cache keeps; none until there is one
        self.collected_step = 0
        self._stack = np.arange(shape.num_pages - 1, -1, -1, dtype=np.int32)  # the free ones come first
        self._limbo: list[tuple[int, np.ndarray]] = []

    @property
    def live_pages(self) -> int:
        """Pages owned by a slot or in limbo."""
        return self.num_pages - self.free_pages - self.cached_pages

    def grow(self, slot_N: np.ndarray, count_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give each of the distinct slots `count_N` more pages; the caller made sure that enough are free.

        Returns the block table entries that changed: slot, index in its row, page; int [U] each.
        """
        pages = int(count_N.sum())
        assert pages <= self.free_pages, (pages, self.free_pages)
        slot_U = np.repeat(slot_N, count_N)
        before_N = np.cumsum(count_N) - count_N
        index_U = np.arange(pages) + np.repeat(self.owned_S[slot_N] - before_N, count_N)
        self.free_pages -= pages
        page_U = self._stack[self.free_pages : self.free_pages + pages].copy()
        self.table_SM[slot_U, index_U] = page_U
        self.owned_S[slot_N] += count_N.astype(np.int32)
        return slot_U, index_U, page_U

    def release(self, slot: int, last_step: int) -> None:
        """Take all pages of a slot; `last_step` is the last dispatched step that may write them."""
        owned = int(self.owned_S[slot])
        pages = self.table_SM[slot, :owned].copy()
        self.owned_S[slot] = 0
        if last_step <= self.collected_step:
            self._push(pages)
        else:
            self._limbo.append((last_step, pages))
            self.limbo_pages += owned

    def step_collected(self, step: int) -> None:
        """Step `step`, and all before it, have written all they will."""
        self.collected_step = step
        if self._limbo:
            for last_step, pages in self._limbo:
                if last_step <= step:
                    self.limbo_pages -= len(pages)
                    self._push(pages)
            self._limbo = [entry for entry in self._limbo if entry[0] > step]

    def _push(self, pages: np.ndarray) -> None:
        self._stack[self.free_pages : self.free_pages + len(pages)] = pages
        self.free_pages += len(pages)

    def check(self) -> None:
        """Raise AssertionError, with all numbers, unless each page is in exactly one place."""
        owned = [self.table_SM[slot, :count] for slot, count in enumerate(self.owned_S)]
        everywhere = np.concatenate([self._stack[: self.free_pages], *owned, *(pages for _, pages in self._limbo)])
        counts = np.bincount(everywhere, minlength=self.num_pages)
        total = self.free_pages + int(self.owned_S.sum()) + self.limbo_pages + self.cached_pages
        if total != self.num_pages or len(counts) != self.num_pages or (counts != 1).any():
            wrong = np.flatnonzero(counts != 1)[:8].tolist()
            raise AssertionError(
                f"page sum: free {self.free_pages} + owned {int(self.owned_S.sum())} + limbo {self.limbo_pages} + "
                f"cached {self.cached_pages} = {total}, pool {self.num_pages}; not in exactly one place: {wrong}"
            )
