"""Which prompts may take part of the next step: takes lanes, queue and what decoding leaves, gives candidates.

Rule 3 of `schedule.py`; decides only, changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from jaxserve.batch import Program
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import NO_PAGES, PagePool, pages_for
from jaxserve.engine.policy import FCFS, LONGEST_PREFIX
from jaxserve.engine.prefix import whole_pages
from jaxserve.engine.sequence import Sequence

SCANNED_SEQUENCES = 64  # waiting ones a lane that one step looks at
PIECE_TOKENS = 128  # a multiple of every attention kernel's query tile: tiles then have the same rows in any company
WORTH_WAITING_TOKENS = 256  # of a prompt, which another one is writing: computing them takes longer than the wait
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
    policy: str = FCFS

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
    writers: list[Sequence] = field(default_factory=list)  # admitted ones whose prompts are not all in the cache yet

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

    def coming_tokens(self, sequence: Sequence, depth: int, limits: Limits) -> int:
        """Of its prompt behind so many pages, what another prompt is about to write."""
        most, keys, found = limits.shared_pages(sequence), sequence.keys, depth
        if self.pool is None or self.pool.prefix is None or len(keys) <= depth + 1 or sequence.wants_scores:
            return 0
        for writer in (*self.writers, *(one.sequence for one in self.candidates if one.slot < 0)):
            pages = min(most, len(writer.keys) - 1, len(writer.token_ids) // limits.page_size_tokens)
            if pages > found and writer.keys[depth + 1] == keys[depth + 1]:
                others = bisect_left(range(1, pages + 1), True, key=lambda i, writer=writer: writer.keys[i] != keys[i])
                found = max(found, others)
        return (found - depth) * limits.page_size_tokens

    def match(self, sequence: Sequence, depth: int, limits: Limits) -> np.ndarray:
        """Those pages, int32: as far as the tokens are the same."""
        assert self.pool is not None and self.pool.prefix is not None
        nodes = self.pool.prefix.match(sequence.keys[1 : depth + 1], sequence.token_ids)
        return nodes[: whole_pages(len(nodes), 1, limits.granule_pages)]


def find_prompts(
    limits: Limits,
    lanes: Iterable[Lane],
    waiting: Iterable[Sequence],
    rows: Iterable[DecodeRows],
    kept_lane: int | None = None,
) -> list[Prompts]:
    """By lane: admitted prompts and the waiting ones that fit, by rank; none of them in `kept_lane`."""
    prompts = [admitted_prompts(limits, lane, part) for lane, part in zip(lanes, rows, strict=True)]
    if kept_lane is not None:
        prompts[kept_lane].free_slots = 0
    scanned = [*islice(waiting, SCANNED_SEQUENCES * len(prompts))]
    if limits.policy == LONGEST_PREFIX:
        scanned.sort(key=lambda sequence: by_prefix(sequence, limits, prompts))
    for place, sequence in enumerate(scanned):
        if not offer(sequence, limits, prompts):
            if limits.policy == LONGEST_PREFIX:  # earlier ones may be among them: they are passed, and not for ever
                prompts[0].passed += [later for later in scanned[place + 1 :] if later.lane <= 0]
            break
    for part in prompts:
        part.candidates.sort(key=lambda candidate: candidate.sequence.rank)
    return prompts


def by_prefix(sequence: Sequence, limits: Limits, prompts: list[Prompts]) -> tuple[bool, int]:
    """Whom the policy longest-prefix-match looks at first; between equals the earlier one, as the queue has them."""
    return not sequence.is_barrier, -max(part.depth(sequence, limits) for part in prompts)


def needed_pages(sequence: Sequence, limits: Limits) -> int:
    """Pages for its prompt and a token more, or all that it can ever need."""
    fed_tokens = len(sequence.token_ids) + len(sequence.to_repeat)
    return pages_for(min(fed_tokens + 1, sequence.limit_tokens - 1), limits.page_size_tokens)


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
    writers = [one for slot, one in lane.writers.items() if not (slot in rows.preempt or pool.closed_S[slot])]
    about = {"pool": pool, "is_reclaiming": bool(rows.preempt), "writers": writers}
    return Prompts(candidates, spare_pages, len(slots.free), **about)


def offer(sequence: Sequence, limits: Limits, prompts: list[Prompts]) -> bool:
    """Rule 3 for one waiting sequence, those before it have had theirs; False if nobody behind it may be admitted."""
    is_barrier, is_bound = sequence.is_barrier, sequence.lane >= 0
    tokens, need_pages = len(sequence.token_ids), needed_pages(sequence, limits)
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
    if not is_barrier and best.coming_tokens(sequence, best_depth, limits) >= WORTH_WAITING_TOKENS:
        return True  # it shares those when they are written: not for ever, as it then has more of its prompt
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
