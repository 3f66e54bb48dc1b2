"""What the next step does: takes a View of the engine, gives `pack` a frozen Plan; decides only, changes nothing.

Rules, in order:
1. Every sequence past its prompt gets one decode row. Where too few pages are free, older rows get theirs first, the
   latest arrivals are preempted (recomputed later), and a row without a page waits a step.
2. Prompts fill the rest of the token budget in chunks, at most one a sequence and `max_chunks` in all. Half of it goes
   to the oldest prompt first, the other half to the shortest remainder first: a long prompt always advances, and a
   short one never waits for its end.
3. A waiting sequence is admitted with its first chunk, if pages for its whole prompt are free beside what admitted
   prompts still need and some headroom for decoding. Smaller ones may pass one that does not fit, but at most
   MAX_PASSED times; nobody passes one that was preempted.
4. Prompts that need prompt_logprobs run in scored steps of their own, taking turns with other work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxserve.batch import Bucket, Program
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.pages import pages_for
from jaxserve.engine.sequence import Sequence, WaitingQueue
from jaxserve.engine.slots import SlotTable

SCANNED_SEQUENCES = 64  # waiting ones that one step looks at
HEADROOM_PART = 16  # admission leaves at most this part of the pool free for decoding rows to grow into


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step."""

    budget_tokens: int
    max_chunks: int
    page_size_tokens: int
    num_pages: int
    buckets: Buckets


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that a decision depends on. Its arrays are the engine's own and are only read."""

    limits: Limits
    slots: SlotTable
    owned_S: np.ndarray  # pages by slot
    free_pages: int
    limbo_pages: int  # free after the next collect
    collected_step: int
    waiting: WaitingQueue
    last_was_scored: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt: `tokens` of its sequence from `start`, for which the slot gets `pages` more pages."""

    sequence: Sequence
    slot: int
    start: int
    tokens: int
    pages: int
    is_first: bool  # the sequence takes the slot now
    is_last: bool  # its last token is sampled


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step. `bucket` None: nothing to dispatch."""

    bucket: Bucket | None
    decode_D: np.ndarray  # slots, int [D]
    growing_N: np.ndarray  # those of them that get a page
    chunks: tuple[Chunk, ...] = ()
    preempt: tuple[int, ...] = ()  # slots
    passed: tuple[Sequence, ...] = ()  # waiting ones that did not fit while later ones might


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decode part of a plan, and the pages left for prompts."""

    slot_D: np.ndarray
    growing_N: np.ndarray
    preempt: tuple[int, ...]
    free_pages: int


@dataclass(slots=True, eq=False)
class Candidate:
    """A prompt that could take a chunk."""

    sequence: Sequence
    slot: int  # -1: it would be admitted
    start: int
    remaining: int  # tokens
    owned: int  # pages
    tokens: int = 0  # given so far


def schedule(view: View) -> Plan:
    """Decide the next step."""
    rows = decode_rows(view)
    slots = view.slots
    if slots.prefilling or (len(view.waiting) and slots.free and rows.free_pages):
        candidates, passed = prompt_candidates(view, rows)
        if candidates:
            return with_chunks(view, rows, candidates, passed)
        return without_chunks(view, rows, passed)
    return without_chunks(view, rows)


def without_chunks(view: View, rows: DecodeRows, passed: tuple[Sequence, ...] = ()) -> Plan:
    """Decode rows alone, if there are any."""
    count = len(rows.slot_D)
    bucket = view.limits.buckets.choose(Program.DECODE, count) if count else None
    return Plan(bucket, rows.slot_D, rows.growing_N, (), rows.preempt, passed)


def decode_rows(view: View) -> DecodeRows:
    """Rule 1."""
    slots = view.slots
    ready_D = slots.decoding_S.nonzero()[0]
    growing_N = ready_D[slots.computed_S[ready_D] >= view.owned_S[ready_D] * view.limits.page_size_tokens]
    if len(growing_N) <= view.free_pages:
        return DecodeRows(ready_D, growing_N, (), view.free_pages - len(growing_N))
    victims = choose_victims(view, set(growing_N.tolist()))
    at_once = [slot for slot in victims if slots.last_step_S[slot] <= view.collected_step]
    free_pages = view.free_pages + int(view.owned_S[at_once].sum())
    hungry = sorted(set(growing_N.tolist()).difference(victims), key=lambda slot: arrival_of(slots, slot))
    fed, starved = hungry[:free_pages], hungry[free_pages:]
    rows = sorted(set(ready_D.tolist()).difference(victims, starved))
    return DecodeRows(np.array(rows, np.int64), np.array(fed, np.int64), tuple(victims), free_pages - len(fed))


def choose_victims(view: View, hungry: set[int]) -> list[int]:
    """The latest arrivals whose pages, with those that come free anyway, feed the `hungry` slots that stay.

    The oldest sequence is never among them: alone it fits, so whoever else holds pages is enough.
    """
    slots = view.slots
    shortage_pages = len(hungry) - view.free_pages - view.limbo_pages
    running = []
    for slot, sequence in enumerate(slots.sequences):
        if sequence is None:
            continue
        if slots.decoding_S[slot] or slot in slots.prefilling:
            running.append(slot)
        else:  # ending or leaving: it gives its pages back at the next collect
            shortage_pages -= int(view.owned_S[slot])
    victims = []
    for slot in sorted(running, key=lambda slot: -arrival_of(slots, slot)):
        if shortage_pages <= 0:
            break
        if view.owned_S[slot]:
            victims.append(slot)
            shortage_pages -= int(view.owned_S[slot]) + (slot in hungry)
    return victims


def arrival_of(slots: SlotTable, slot: int) -> int:
    """The arrival rank of the sequence in an occupied slot."""
    sequence = slots.sequences[slot]
    assert sequence is not None, slot
    return sequence.arrival


def prompt_candidates(view: View, rows: DecodeRows) -> tuple[list[Candidate], tuple[Sequence, ...]]:
    """Admitted prompts and the waiting ones that fit (rule 3), by arrival; and the waiting ones that do not fit."""
    slots, limits = view.slots, view.limits
    candidates = []
    promised_pages = 0
    for slot, sequence in slots.prefilling.items():
        if slot in rows.preempt:
            continue
        start, owned = int(slots.computed_S[slot]), int(view.owned_S[slot])
        promised_pages += pages_for(len(sequence.token_ids), limits.page_size_tokens) - owned
        candidates.append(Candidate(sequence, slot, start, len(sequence.token_ids) - start, owned))
    headroom_pages = min(len(rows.slot_D), max(1, limits.num_pages // HEADROOM_PART))
    spare_pages = rows.free_pages - promised_pages - headroom_pages
    free_slots = len(slots.free)
    passed: list[Sequence] = []
    behind_barrier = False
    for sequence in islice(view.waiting, SCANNED_SEQUENCES):
        if not free_slots or (behind_barrier and not sequence.is_barrier):
            break
        tokens = len(sequence.token_ids)
        need_pages = pages_for(min(tokens + 1, sequence.limit_tokens - 1), limits.page_size_tokens)
        behind_barrier |= sequence.is_barrier
        if need_pages <= spare_pages:
            candidates.append(Candidate(sequence, -1, 0, tokens, 0))
            spare_pages -= need_pages
            free_slots -= 1
        else:
            passed.append(sequence)
            if sequence.is_barrier:
                break
    candidates.sort(key=lambda candidate: candidate.sequence.arrival)
    return candidates, tuple(passed)


def with_chunks(view: View, rows: DecodeRows, candidates: list[Candidate], passed: tuple[Sequence, ...]) -> Plan:
    """Rules 2 and 4."""
    buckets = view.limits.buckets
    scored = [candidate for candidate in candidates if candidate.sequence.wants_scores]
    plain = [candidate for candidate in candidates if not candidate.sequence.wants_scores]
    crowded = len(rows.slot_D) > buckets.scored_tokens // 2  # decode rows would leave scored chunks no room
    use_scored = bool(scored) and not (view.last_was_scored and (plain or crowded))
    if use_scored and crowded:
        nobody = rows.slot_D[:0]
        freed_pages = rows.free_pages + len(rows.growing_N)
        use_rows = DecodeRows(nobody, nobody, rows.preempt, freed_pages)
    else:
        use_rows = rows
    budget_tokens = buckets.scored_tokens if use_scored else view.limits.budget_tokens
    candidates = scored if use_scored else plain
    share_budget(candidates, budget_tokens - len(use_rows.slot_D), view.limits.max_chunks)
    chunks = cut_chunks(view, candidates, use_rows.free_pages)
    if not chunks:
        return without_chunks(view, rows, passed)
    tokens = len(use_rows.slot_D) + sum(chunk.tokens for chunk in chunks)
    bucket = buckets.choose(Program.SCORED if use_scored else Program.MIXED, tokens)
    return Plan(bucket, use_rows.slot_D, use_rows.growing_N, chunks, rows.preempt, passed)


def share_budget(candidates: list[Candidate], budget_tokens: int, max_chunks: int) -> None:
    """Rule 2: set each candidate's `tokens`; `candidates` are sorted by arrival."""
    chunks, left_tokens = 0, budget_tokens
    half_tokens = (budget_tokens + 1) // 2
    for candidate in candidates[: max(1, max_chunks // 2)]:
        candidate.tokens = min(candidate.remaining, half_tokens)
        half_tokens -= candidate.tokens
        left_tokens -= candidate.tokens
        chunks += candidate.tokens > 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.remaining - candidate.tokens):
        if left_tokens <= 0:
            break
        if candidate.tokens or chunks < max_chunks:
            more_tokens = min(candidate.remaining - candidate.tokens, left_tokens)
            chunks += candidate.tokens == 0 and more_tokens > 0
            candidate.tokens += more_tokens
            left_tokens -= more_tokens


def cut_chunks(view: View, candidates: list[Candidate], free_pages: int) -> tuple[Chunk, ...]:
    """Chunks for which there are pages, older prompts first; the next free slots for those who have none."""
    page_size_tokens = view.limits.page_size_tokens
    free_slots = iter(reversed(view.slots.free))
    chunks = []
    for candidate in candidates:
        room_tokens = (candidate.owned + free_pages) * page_size_tokens - candidate.start
        tokens = min(candidate.tokens, room_tokens)
        if tokens <= 0:
            continue
        pages = max(0, pages_for(candidate.start + tokens, page_size_tokens) - candidate.owned)
        free_pages -= pages
        is_first = candidate.slot < 0
        slot = next(free_slots) if is_first else candidate.slot
        is_last = candidate.start + tokens == len(candidate.sequence.token_ids)
        chunks.append(Chunk(candidate.sequence, slot, candidate.start, tokens, pages, is_first, is_last))
    return tuple(chunks)
