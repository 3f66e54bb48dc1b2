"""What the next step does: takes a View of the engine, gives `pack` a frozen Plan; decides only, changes nothing.

Rules, in order; a lane is a rank of data parallelism with slots and pages of its own. Who is older, or earlier, is so
by the policy (`policy.py`), which is the order of arrival if nothing else is asked for:
1. Every sequence past its prompt gets one decode row. Where too few pages are free, older rows get theirs first, the
   latest ones are preempted (recomputed later), and a row without a page waits a step. Under the policy `priority` less
   important ones make room for the first of the queue, too (`urgent.py`).
2. Prompts fill the rest of a lane's token budget in chunks, at most one a sequence and `max_chunks` in all. Half of it
   goes to the oldest prompt first, the other half to the shortest remainder first: a long prompt always advances, and
   a short one never waits for its end.
3. A waiting sequence is admitted with its first chunk, if pages for its whole prompt are available beside what admitted
   prompts still need and some headroom for decoding. Pages of the prefix cache that hold the start of its prompt are
   shared, and only the rest is computed, at least one token; while another prompt is writing much of that rest, as with
   the choices of one request, it waits. It goes to the lane that has the most pages left, where each page it would
   share counts AFFINITY times: lanes stay balanced by tokens, and conversations mostly in theirs. Smaller ones may pass
   one that fits nowhere, but at most MAX_PASSED times, then it keeps to a lane; nobody passes one that was preempted in
   its lane, to which it returns. After a step that failed, who was in it comes back one at a time (`suspects.py`).
4. Prompts that need prompt_logprobs run in scored steps of their own, taking turns with other work. A lane that has
   none runs other prompts in a scored step, as far as they go into its bucket.
5. All lanes run one program in the smallest bucket that takes each of them.

A deterministic engine's requests get the same numbers in any company. There a token must go through the same program
whatever else runs, and stand in its prompt's chunks where it always does, so:
- decode rows and prompts never share a step but take turns, and rule 4 puts no prompt into the others' scored steps;
- all chunks of a prompt go through mixed steps of one size, that of its whole length, with prompts of that size only;
  sizes take turns, too: the oldest prompt's and that of the shortest remainder;
- chunks end at multiples of `piece_tokens` of their prompt, or with it, and what is shared ends at multiples of
  PIECE_TOKENS; whose steps have another size shares nothing (`inbox.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.batch import Bucket, Program
from jaxserve.engine.admission import Candidate, DecodeRows, Limits, Prompts, find_prompts, pages_taken
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import NO_PAGES, Reclaim, pages_for
from jaxserve.engine.policy import PRIORITY
from jaxserve.engine.sequence import Sequence, WaitingQueue
from jaxserve.engine.suspects import Suspects
from jaxserve.engine.urgent import Reserved, make_room


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """All that a decision depends on. Lanes and queue are the engine's own and are only read."""

    limits: Limits
    lanes: tuple[Lane, ...]
    waiting: WaitingQueue
    suspects: Suspects
    last_was_scored: bool  # of a deterministic engine: the last step that had prompts
    last_had_prompts: bool = False
    last_mixed_tokens: int = 0  # size of the last mixed step


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Part of a prompt: `tokens` of its sequence from `start`, for which the slot gets `pages` more pages."""

    sequence: Sequence
    slot: int
    start: int
    tokens: int
    pages: int
    is_first: bool  # the sequence takes the slot now
    is_last: bool  # its last token is sampled
    shared: np.ndarray = field(default_factory=NO_PAGES.copy)  # int32, with the first: nodes that it begins with


@dataclass(frozen=True, slots=True, eq=False)
class LanePlan:
    """What one lane does in a step."""

    rows: DecodeRows
    chunks: tuple[Chunk, ...] = ()
    passed: tuple[Sequence, ...] = ()  # waiting ones that fit nowhere, here least badly, while later ones might

    @property
    def tokens(self) -> int:
        """Rows that it needs in a bucket."""
        return len(self.rows.slot_D) + sum(chunk.tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step. `bucket` None: nothing to dispatch."""

    bucket: Bucket | None
    lanes: list[LanePlan]
    reserved: Reserved | None = None


def schedule(view: View) -> Plan:
    """Decide the next step."""
    rows = [decode_rows(view.limits, lane) for lane in view.lanes]
    if view.limits.policy != PRIORITY or len(view.suspects):  # nobody makes room for who may not come yet
        return with_rows(view, rows)
    rows, reserved = make_room(view.limits, view.lanes, view.waiting, rows)
    return replace(with_rows(view, rows, reserved), reserved=reserved)


def with_rows(view: View, rows: list[DecodeRows], reserved: Reserved | None = None) -> Plan:
    """Rules 2 to 5. Nobody is admitted to a lane in which room is being made."""
    is_waiting = len(view.waiting) > 0
    if view.limits.deterministic and view.last_had_prompts and any(len(part.slot_D) for part in rows):
        return decode_alone(view, [LanePlan(part) for part in rows])
    for lane, part in zip(view.lanes, rows, strict=True):
        if lane.slots.prefilling or (is_waiting and lane.slots.free and part.free_pages):
            kept_lane = None if reserved is None else reserved.lane
            waiting = view.suspects.eligible(view.waiting)
            return with_prompts(view, rows, find_prompts(view.limits, view.lanes, waiting, rows, kept_lane))
    return decode_alone(view, [LanePlan(part) for part in rows])


def decode_alone(view: View, plans: list[LanePlan]) -> Plan:
    """Rule 5 for lanes without chunks."""
    count = max([len(plan.rows.slot_D) for plan in plans])
    return Plan(view.limits.buckets.choose(Program.DECODE, count) if count else None, plans)


def decode_rows(limits: Limits, lane: Lane) -> DecodeRows:
    """Rule 1."""
    slots, pool = lane.slots, lane.pool
    ready_D = slots.decoding_S.nonzero()[0]
    growing_N = ready_D[slots.computed_S[ready_D] >= pool.owned_S[ready_D] * limits.page_size_tokens]
    if len(growing_N) <= pool.available_pages:
        return DecodeRows(ready_D, growing_N, (), pool.available_pages - len(growing_N))
    victims = choose_victims(lane, set(growing_N.tolist()))
    at_once = [slot for slot in victims if slots.last_step_S[slot] <= pool.collected_step]
    free_pages = Reclaim(pool, with_limbo=False).give_up(at_once)
    hungry = sorted(set(growing_N.tolist()).difference(victims), key=lambda slot: slots.tenant(slot).rank)
    fed, starved = hungry[:free_pages], hungry[free_pages:]
    rows = sorted(set(ready_D.tolist()).difference(victims, starved))
    return DecodeRows(np.array(rows, np.int64), np.array(fed, np.int64), tuple(victims), free_pages - len(fed))


def choose_victims(lane: Lane, hungry: set[int]) -> list[int]:
    """The latest arrivals whose pages, with those that come free anyway, feed the `hungry` slots that stay.

    The oldest sequence is never among them: alone it fits, so whoever else holds pages is enough.
    """
    slots, pool = lane.slots, lane.pool
    coming = Reclaim(pool, with_limbo=True)
    wanted_pages = len(hungry)
    running = []
    for slot, sequence in enumerate(slots.sequences):
        if sequence is None:
            continue
        if slots.decoding_S[slot] or slot in slots.prefilling:
            running.append(slot)
        else:  # ending or leaving: it gives its pages back at the next collect
            coming.give_up((slot,))
    victims = []
    for slot in sorted(running, key=lambda slot: slots.tenant(slot).rank, reverse=True):
        if wanted_pages <= coming.pages:
            break
        if pool.owned_S[slot]:
            victims.append(slot)
            coming.give_up((slot,))
            wanted_pages -= slot in hungry
    return victims


def with_prompts(view: View, rows: list[DecodeRows], prompts: list[Prompts]) -> Plan:
    """Rules 2, 4 and 5."""
    if not any(part.candidates for part in prompts):
        return decode_alone(view, [LanePlan(part) for part in rows])
    parts = [*zip(view.lanes, rows, prompts, strict=True)]
    plans = []
    for scored, step_tokens in attempts(view, rows, prompts):
        plans = [lane_plan(view.limits, *part, scored, step_tokens) for part in parts]
        chunks = [chunk for plan in plans for chunk in plan.chunks]
        if any(chunk.sequence.wants_scores or not scored for chunk in chunks):
            tokens = step_tokens or max(plan.tokens for plan in plans)
            return Plan(view.limits.buckets.choose(Program.SCORED if scored else Program.MIXED, tokens), plans)
    return decode_alone(view, [replace(plan, rows=part) for plan, part in zip(plans, rows, strict=True)])


def attempts(view: View, rows: list[DecodeRows], prompts: list[Prompts]) -> list[tuple[bool, int]]:
    """Steps with prompts to try in turn: whether it is scored, and the size of a mixed one, 0: what fits."""
    mixed = [(False, step_tokens) for step_tokens in mixed_sizes(view, prompts)]
    if wants_scored(view, rows, prompts):
        return [(True, 0), *mixed]
    return [*mixed, (True, 0)] if view.limits.deterministic else mixed


def mixed_sizes(view: View, prompts: list[Prompts]) -> list[int]:
    """Sizes of mixed steps, first that whose turn it is; 0: any size that holds what there is."""
    limits = view.limits
    if not limits.deterministic:
        return [0]
    plain = [candidate for part in prompts for candidate in part.candidates if not candidate.sequence.wants_scores]
    plain.sort(key=lambda candidate: candidate.sequence.rank)
    sizes = [limits.step_tokens(len(candidate.sequence.token_ids)) for candidate in plain]
    if sizes and sizes[0] == view.last_mixed_tokens:
        shortest = min(plain, key=lambda candidate: candidate.remaining)
        sizes.insert(0, limits.step_tokens(len(shortest.sequence.token_ids)))
    return [*dict.fromkeys(sizes)]


def wants_scored(view: View, rows: list[DecodeRows], prompts: list[Prompts]) -> bool:
    """Whether it is the turn of scored chunks: always, but for those that the last scored step made wait."""
    some_scored = some_wait = False
    for part, lane_rows in zip(prompts, rows, strict=True):
        scored = [candidate for candidate in part.candidates if candidate.sequence.wants_scores]
        some_scored |= bool(scored)
        some_wait |= len(scored) < len(part.candidates)
        if not view.limits.deterministic:
            some_wait |= len(lane_rows.slot_D) > most_rows(view.limits.buckets, bool(scored))
    return some_scored and not (view.last_was_scored and some_wait)


def most_rows(buckets: Buckets, has_scored: bool) -> int:
    """Decode rows that a lane may bring to a scored step: more would leave scored chunks no room, and all wait."""
    return buckets.scored_tokens // 2 if has_scored else buckets.scored_tokens


def lane_plan(
    limits: Limits, lane: Lane, rows: DecodeRows, prompts: Prompts, scored: bool, step_tokens: int = 0
) -> LanePlan:
    """A lane's rows and chunks in a step that is `scored` or not; `step_tokens`: with prompts of that size only."""
    plain = [candidate for candidate in prompts.candidates if not candidate.sequence.wants_scores]
    candidates, budget_tokens, use_rows = plain, limits.budget_tokens, rows
    if limits.deterministic:
        use_rows = rows.held_back(keep_pages=True)
    if step_tokens:
        candidates = [
            candidate for candidate in plain if limits.step_tokens(len(candidate.sequence.token_ids)) == step_tokens
        ]
        budget_tokens = min(budget_tokens, step_tokens)
    if scored:
        has_scored = len(plain) < len(prompts.candidates)
        if has_scored or limits.deterministic:
            candidates = [candidate for candidate in prompts.candidates if candidate.sequence.wants_scores]
        budget_tokens = limits.buckets.scored_tokens
        if len(use_rows.slot_D) > most_rows(limits.buckets, has_scored):
            use_rows = rows.held_back()
    piece_tokens = limits.piece_tokens(budget_tokens)
    share_budget(candidates, budget_tokens - len(use_rows.slot_D), limits.max_chunks, piece_tokens)
    chunks = cut_chunks(limits, lane, candidates, use_rows.free_pages, piece_tokens, prompts.is_reclaiming)
    return LanePlan(use_rows, chunks, tuple(prompts.passed))


def share_budget(candidates: list[Candidate], budget_tokens: int, max_chunks: int, piece_tokens: int = 1) -> None:
    """Rule 2: set each candidate's `tokens`; `candidates` are sorted by arrival."""
    for candidate in candidates:
        candidate.tokens = 0
    chunks, left_tokens = 0, budget_tokens
    half_tokens = (budget_tokens + 1) // 2
    for candidate in candidates[: max(1, max_chunks // 2)]:
        candidate.tokens = candidate.most_tokens(half_tokens, piece_tokens)
        half_tokens -= candidate.tokens
        left_tokens -= candidate.tokens
        chunks += candidate.tokens > 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.remaining - candidate.tokens):
        if left_tokens <= 0:
            break
        if candidate.tokens or chunks < max_chunks:
            more_tokens = candidate.most_tokens(candidate.tokens + left_tokens, piece_tokens) - candidate.tokens
            chunks += candidate.tokens == 0 and more_tokens > 0
            candidate.tokens += more_tokens
            left_tokens -= more_tokens


def cut_chunks(
    limits: Limits,
    lane: Lane,
    candidates: list[Candidate],
    free_pages: int,
    piece_tokens: int = 1,
    is_reclaiming: bool = False,
) -> tuple[Chunk, ...]:
    """Chunks for which there are pages, older prompts first; the next free slots for those who have none."""
    page_size_tokens = limits.page_size_tokens
    free_slots = iter(reversed(lane.slots.free))
    chunks = []
    for candidate in candidates:
        taken = pages_taken(lane.pool, candidate.shared, is_reclaiming)
        room_tokens = (candidate.owned + free_pages - taken) * page_size_tokens - candidate.start
        tokens = candidate.most_tokens(min(candidate.tokens, room_tokens), piece_tokens)
        if tokens <= 0:
            continue
        pages = max(0, pages_for(candidate.start + tokens, page_size_tokens) - candidate.owned)
        free_pages -= pages + taken
        is_first = candidate.slot < 0
        slot = next(free_slots) if is_first else candidate.slot
        is_last = candidate.start + tokens == len(candidate.sequence.token_ids)
        about = (candidate.start, tokens, pages, is_first, is_last, candidate.shared)
        chunks.append(Chunk(candidate.sequence, slot, *about))
    return tuple(chunks)
