"""Room for a more important request: takes a View and what decoding leaves, tells who must leave and for whom.

Only under the policy `priority`. Sequences that are strictly less important are preempted, the least important and
latest ones first, for the first of the queue where it fits neither beside them nor beside what comes free anyway, and
for a prompt that has its slot and whose pages others have grown into; never where even that would not do. Decides only,
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from jaxserve.engine.admission import DecodeRows, Limits, admitted_prompts, needed_pages, pages_taken
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import NO_PAGES, Reclaim, pages_for
from jaxserve.engine.sequence import Sequence, WaitingQueue


class Reserved(NamedTuple):
    """What comes free in a lane is kept for a waiting sequence."""

    sequence: Sequence
    lane: int


def make_room(
    limits: Limits, lanes: Several[Lane], waiting: WaitingQueue, rows: list[DecodeRows]
) -> tuple[list[DecodeRows], Reserved | None]:
    """The lanes' rows without those who leave, and for whom of the queue; None where it needs nobody's place."""
    rows = [feed_prompts(limits, lane, part) for lane, part in zip(lanes, rows, strict=True)]
    first = next(iter(waiting), None)
    if first is None:
        return rows, None
    found: list[tuple[int, int, list[int]]] = []  # how many leave, lane, and who
    for lane, part in zip(lanes, rows, strict=True):
        if first.lane not in (-1, lane.index):
            continue
        prompts = admitted_prompts(limits, lane, part)
        depth = prompts.depth(first, limits)
        shared = prompts.match(first, depth, limits) if depth else NO_PAGES
        taken = pages_taken(prompts.pool, shared, prompts.is_reclaiming)
        need_pages = needed_pages(first, limits) - len(shared) + taken

        def fits(later: DecodeRows, slots: int, lane: Lane = lane, need_pages: int = need_pages) -> bool:
            return slots > 0 and need_pages <= admitted_prompts(limits, lane, later).spare_pages

        if fits(part, prompts.free_slots):
            return rows, None
        victims = who_leaves(lane, part, first.request.priority, fits)
        if victims is not None:
            found.append((len(victims), lane.index, victims))
    if not found:
        return rows, None
    _, index, victims = min(found)
    rows[index] = without(lanes[index], rows[index], victims)
    return rows, Reserved(first, index)


def feed_prompts(limits: Limits, lane: Lane, rows: DecodeRows) -> DecodeRows:
    """The rows without those whose pages an admitted, more important prompt has been promised."""
    need_pages = 0
    for slot, sequence in sorted(lane.slots.prefilling.items(), key=lambda item: item[1].rank):
        if slot in rows.preempt:
            continue
        need_pages += pages_for(len(sequence.token_ids), limits.page_size_tokens) - int(lane.pool.owned_S[slot])
        if need_pages > rows.free_pages:
            break
    else:
        return rows
    victims = who_leaves(lane, rows, sequence.request.priority, lambda later, _: need_pages <= later.free_pages)
    return without(lane, rows, victims) if victims else rows


def who_leaves(
    lane: Lane, rows: DecodeRows, priority: int, enough: Callable[[DecodeRows, int], bool]
) -> list[int] | None:
    """As few less important slots as suffice, none where what comes free anyway does; None where all would not do.

    enough: tells it from the rows that stay, with the pages that will be there, and the slots that will be free.
    """
    slots = lane.slots
    coming = Reclaim(lane.pool, with_limbo=True)
    free_slots, running = len(slots.free), []
    for slot, sequence in enumerate(slots.sequences):
        if sequence is None:
            continue
        if slot in rows.preempt or not (slots.decoding_S[slot] or slot in slots.prefilling):
            coming.give_up((slot,))
            free_slots += 1
        elif sequence.request.priority > priority:
            running.append(slot)
    running.sort(key=lambda slot: slots.tenant(slot).rank, reverse=True)
    for count in range(len(running) + 1):
        victims = running[:count]
        pages = coming.give_up(victims[-1:])
        kept_D, growing_N = kept(rows.slot_D, victims), kept(rows.growing_N, victims)
        later = DecodeRows(kept_D, growing_N, (*rows.preempt, *victims), pages - len(growing_N))
        if enough(later, free_slots + count):
            return victims
    return None


def without(lane: Lane, rows: DecodeRows, victims: list[int]) -> DecodeRows:
    """The rows of those who stay, and the pages that are there now."""
    preempt = (*rows.preempt, *victims)
    at_once = [slot for slot in preempt if lane.slots.last_step_S[slot] <= lane.pool.collected_step]
    growing_N = kept(rows.growing_N, victims)
    free_pages = Reclaim(lane.pool, with_limbo=False).give_up(at_once) - len(growing_N)
    return DecodeRows(kept(rows.slot_D, victims), growing_N, preempt, free_pages)


def kept(slot_N: np.ndarray, victims: list[int]) -> np.ndarray:
    """Those of the slots that are no victims."""
    return slot_N[~np.isin(slot_N, victims)]
