"""Which prompts may take part of the next step: takes lanes, queue and what decoding leaves, gives candidates.

Rule 3 of `schedule.py`; decides only, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jaxserve.batch import Program
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import NO_PAGES, PagePool, pages_for
from jaxserve.engine.prefix import whole_pages
from jaxserve.engine.sequence import Sequence, WaitingQueue

SCANNED_SEQUENCES = 64  # waiting ones a lane that one step looks at
PIECE_TOKENS = 128  # a multiple of every attention kernel's query tile: tiles then have the same rows in any company
AFFINITY = 8  # a lane may have so many pages less left for each page of a prompt that it has in its prefix cache
HEADROOM_PART = 16  # admission leaves at most this part of a pool free for decoding rows to grow into


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a lane's part of a step."""

    budget_tokens: int
    max_chunks: int
    page_size_tokens: int
    num_pages: int
    buckets: Buckets
    deterministic: bool = False

    def piece_tokens(self, budget_tokens: int) -> int:
        """See above: a power of two of which the oldest prompt's share of a step's budget always holds one."""
        if not self.deterministic:
            return 1
        return min(PIECE_TOKENS, 1 << (max(1, budget_tokens // 2).bit_length() - 1))

    @property
    def granule_pages(self) -> int:
        """Shared pages come in so many: with a deterministic engine they end where a piece does."""
        return max(1, PIECE_TOKENS // self.page_size_tokens) if self.deterministic else 1

    def shared_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence may share at most: one token is always computed, as its logits are needed."""
        return whole_pages(len(sequence.token_ids) - 1, self.page_size_tokens)

    def step_tokens(self, prompt_tokens: int) -> int:
        """Size of the mixed steps that a deterministic engine runs a prompt of so many tokens in."""
        return self.buckets.choose(Program.MIXED, min(prompt_tokens, self.budget_tokens)).rows


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decode part of a lane's plan, and the pages left for prompts."""

    slot_D: np.ndarray  # int [D]
    growing_N: np.ndarray  # those of them that get a page
    preempt: tuple[int, ...]  # slots
    free_pages: int

    def held_back(self, keep_pages: bool = False) -> DecodeRows:
        """No row this time, and the pages that they would have grown into are left, or kept for the next step."""
        nobody = self.slot_D[:0]
        return DecodeRows(nobody, nobody, self.preempt, self.free_pages + (0 if keep_pages else len(self.growing_N)))


@dataclass(slots=True, eq=False)
class Candidate:
    """A prompt that could take a chunk."""

    sequence: Sequence
    slot: int  # -1: it would be admitted
    start: int
    remaining: int  # tokens
    owned: int  # pages
    tokens: int = 0  # given so far
    shared: np.ndarray = field(default_factory=NO_PAGES.copy)  # int32: nodes that it would begin with

    def most_tokens(self, room_tokens: int, piece_tokens: int) -> int:
        """Of its prompt, what a chunk may hold that has so much room."""
        if room_tokens >= self.remaining:
            return self.remaining
        return max(0, (self.start + room_tokens) // piece_tokens * piece_tokens - self.start)


@dataclass(slots=True, eq=False)
class Prompts:
    """A lane's prompts, and what it has left for waiting ones."""

    candidates: list[Candidate]
    spare_pages: int
    free_slots: int
    has_barrier: bool = False  # one of the candidates, which no later arrival may pass
    passed: list[Sequence] = field(default_factory=list)
    pool: PagePool | None = None  # with the prefix cache to look into
    is_reclaiming: bool = False  # somebody is preempted in this step

    def room(self) -> tuple[int, int]:
        """Between lanes of equal rank: who need evict nothing goes first, then who has evicted least."""
        if self.pool is None or self.pool.prefix is None:
            return 0, 0
        return self.pool.free_pages, -self.pool.prefix.evicted_pages

    def depth(self, sequence: Sequence, limits: Limits) -> int:
        """Pages of the prefix cache that hold the start of its prompt, by their keys alone."""
        if self.pool is None or self.pool.prefix is None or not sequence.keys or sequence.wants_scores:
            return 0
        most = limits.shared_pages(sequence)
        return whole_pages(self.pool.prefix.depth(sequence.keys[1 : most + 1]), 1, limits.granule_pages)

    def match(self, sequence: Sequence, depth: int, limits: Limits) -> np.ndarray:
        """Those pages, int32: as far as the tokens are the same."""
        assert self.pool is not None and self.pool.prefix is not None
        nodes = self.pool.prefix.match(sequence.keys[1 : depth + 1], sequence.token_ids)
        return nodes[: whole_pages(len(nodes), 1, limits.granule_pages)]


def find_prompts(
    limits: Limits, lanes: Iterable[Lane], waiting: WaitingQueue, rows: Iterable[DecodeRows]
) -> list[Prompts]:
    """By lane: admitted prompts and the waiting ones that fit, by arrival."""
    prompts = [admitted_prompts(limits, lane, part) for lane, part in zip(lanes, rows, strict=True)]
    for sequence in islice(waiting, SCANNED_SEQUENCES * len(prompts)):
        if not offer(sequence, limits, prompts):
            break
    for part in prompts:
        part.candidates.sort(key=lambda candidate: candidate.sequence.arrival)
    return prompts


def admitted_prompts(limits: Limits, lane: Lane, rows: DecodeRows) -> Prompts:
    """The prompts of a lane that have their slots, and what it can still admit."""
    slots, pool = lane.slots, lane.pool
    candidates = []
    promised_pages = 0
    for slot, sequence in slots.prefilling.items():
        if slot in rows.preempt:
            continue
        start, owned = int(slots.computed_S[slot]), int(pool.owned_S[slot])
        promised_pages += pages_for(len(sequence.token_ids), limits.page_size_tokens) - owned
        candidates.append(Candidate(sequence, slot, start, len(sequence.token_ids) - start, owned))
    headroom_pages = min(len(rows.slot_D), max(1, limits.num_pages // HEADROOM_PART))
    spare_pages = rows.free_pages - promised_pages - headroom_pages
    return Prompts(candidates, spare_pages, len(slots.free), pool=pool, is_reclaiming=bool(rows.preempt))


def offer(sequence: Sequence, limits: Limits, prompts: list[Prompts]) -> bool:
    """Rule 3 for one waiting sequence, those before it have had theirs; False if nobody behind it may be admitted."""
    is_barrier, is_bound = sequence.is_barrier, sequence.lane >= 0
    tokens = len(sequence.token_ids)
    fed_tokens = tokens + len(sequence.to_repeat)
    need_pages = pages_for(min(fed_tokens + 1, sequence.limit_tokens - 1), limits.page_size_tokens)
    best, best_depth, best_rank = None, 0, (False, 0, 0, 0)
    for part in (prompts[sequence.lane],) if is_bound else prompts:
        if not part.free_slots or (part.has_barrier and not is_barrier):
            continue
        depth = part.depth(sequence, limits)
        rank = (need_pages <= part.spare_pages, part.spare_pages + AFFINITY * depth, *part.room())
        if best is None or rank > best_rank:
            best, best_depth, best_rank = part, depth, rank
    if best is None:
        return is_bound and any(part.free_slots for part in prompts)
    shared = NO_PAGES
    if best_depth and need_pages - best_depth <= best.spare_pages:
        shared = best.match(sequence, best_depth, limits)
        need_pages -= len(shared) - pages_taken(best.pool, shared, best.is_reclaiming)
    if need_pages <= best.spare_pages:
        start = len(shared) * limits.page_size_tokens
        best.candidates.append(Candidate(sequence, -1, start, tokens - start, len(shared), shared=shared))
        best.spare_pages -= need_pages
        best.free_slots -= 1
        best.has_barrier |= is_barrier
        return True
    best.passed.append(sequence)
    if not is_barrier:
        return True
    best.free_slots = 0  # all that comes free is kept for it
    return any(part.free_slots for part in prompts)


def pages_taken(pool: PagePool | None, shared: np.ndarray, is_reclaiming: bool) -> int:
    """How many fewer pages are available once `shared` nodes are held: those that nobody holds now.

    Where somebody is preempted in the same step, all count: it may be the only one who holds them.
    """
    if is_reclaiming or pool is None or pool.prefix is None:
        return len(shared)
    return int(pool.prefix.idle_P[shared].sum())
