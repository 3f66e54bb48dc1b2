"""From a Plan to a Batch: takes what `schedule` decided, moves the ledger on, gives installs and a vector a lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.batch import FLAG_FILTER, FLAG_RANDOM, FLAGS_WORD, Batch, Bucket, Install, Layout, Program, Shape
from jaxserve.engine.lane import Lane
from jaxserve.engine.ledger import Ledger
from jaxserve.engine.schedule import LanePlan, Plan
from jaxserve.engine.sequence import MAX_PASSED, Sequence, make_install
from jaxserve.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class PackedLane:
    """One lane's part of a step.

    slot_Q, generation_Q, position_Q: the sampled rows' slots, the slots' generations then, and the position that the
    sampled token has in its sequence. The plan's decode rows come first, then the last chunks of prompts.
    """

    plan: LanePlan
    slot_Q: np.ndarray
    generation_Q: np.ndarray
    position_Q: np.ndarray
    chunk_generations: tuple[int, ...]
    chunk_starts: tuple[int, ...]  # packed index of each chunk's first token

    def alive(self, slots: SlotTable) -> list[Sequence]:
        """The sequences that the step has rows for and that still hold their slots."""
        pairs = [*zip(self.plan.rows.slot_D.tolist(), self.generation_Q.tolist(), strict=False)]
        pairs += [(chunk.slot, was) for chunk, was in zip(self.plan.chunks, self.chunk_generations, strict=True)]
        kept = [slots.sequences[slot] for slot, generation in pairs if slots.generation_S[slot] == generation]
        return [sequence for sequence in kept if sequence is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A step that is ready for the device, and what `collect` must know of it."""

    step: int
    batch: Batch
    installs: list[Install]
    flags: int
    lanes: list[PackedLane]

    @property
    def is_scored(self) -> bool:
        """Its chunks' tokens are scored."""
        return self.batch.bucket.program is Program.SCORED

    def alive(self, ledger: Ledger) -> list[Sequence]:
        """The sequences that the step has rows for and that still hold their slots."""
        pairs = zip(self.lanes, ledger.lanes, strict=True)
        return [sequence for part, lane in pairs for sequence in part.alive(lane.slots)]


class Packer:
    """Holds a padded vector and the field offsets of every bucket."""

    def __init__(self, shape: Shape, buckets: list[Bucket]) -> None:
        self.shape = shape
        self._templates: dict[Bucket, tuple[np.ndarray, list[tuple[str, slice]]]] = {}
        for bucket in buckets:
            layout = Layout(bucket, shape)
            places = [(f.name, slice(f.offset, f.offset + f.count)) for f in layout.fields.values()]
            self._templates[bucket] = np.stack([layout.empty()] * shape.lanes), places

    def apply(self, plan: Plan, ledger: Ledger, step: int) -> Packed | None:
        """Admit, preempt, give out pages, pack and advance the slots; None if the plan runs nothing."""
        installs = seat(plan, ledger)
        if plan.bucket is None:
            return None
        template, places = self._templates[plan.bucket]
        vector = template.copy()  # the device may still read an older one
        parts, flags = [], 0
        for lane in ledger.lanes:
            row = vector[lane.index]
            views = {name: row[where] for name, where in places}
            part = pack_lane(plan.bucket, plan.lanes[lane.index], lane, views, step)
            if len(part.slot_Q):
                flags |= int(np.bitwise_or.reduce(lane.slots.flag_S[part.slot_Q]))
            parts.append(part)
        if ledger.deterministic and flags & FLAG_RANDOM:
            flags |= FLAG_FILTER  # a draw is rounded otherwise where the filters are left out
        vector[:, FLAGS_WORD] = flags
        return Packed(step, Batch(plan.bucket, vector), installs, flags, parts)


def seat(plan: Plan, ledger: Ledger) -> list[Install]:
    """Who takes a slot and who leaves one; returns what the device must know of the former."""
    admitted, installs = [], []
    for lane, part in zip(ledger.lanes, plan.lanes, strict=True):
        for chunk in part.chunks:
            if chunk.is_first:
                ledger.admit(chunk.sequence, lane, chunk.slot, chunk.shared)
                admitted.append(chunk.sequence)
                installs.append(make_install(chunk.sequence, chunk.shared))
        for slot in part.rows.preempt:
            ledger.preempt(lane.slots.tenant(slot))
    for index, part in enumerate(plan.lanes):
        for waiting in part.passed if admitted else ():
            waiting.passed += sum(waiting.rank < sequence.rank for sequence in admitted)
            if waiting.is_barrier:
                waiting.lane = index  # or pages would be kept for it now here, now there, and nowhere enough
    if plan.reserved is not None and plan.reserved.sequence.slot < 0:
        urgent = plan.reserved.sequence
        urgent.lane, urgent.passed = plan.reserved.lane, MAX_PASSED  # nobody takes what comes free
    return installs


def pack_lane(bucket: Bucket, plan: LanePlan, lane: Lane, views: dict[str, np.ndarray], step: int) -> PackedLane:
    """Give out a lane's pages, pack its rows into the `views` of its padded vector and advance its slots."""
    slots, starts = lane.slots, ()
    slot_Q = slot_D = plan.rows.slot_D
    update_table(plan, lane, views)
    if bucket.program is Program.DECODE:
        views["slot"][: len(slot_Q)] = slot_Q
        views["position"][: len(slot_Q)] = slots.computed_S[slot_Q]
    else:
        slot_Q, starts = pack_mixed(plan, lane, views)
    slots.advance_decode(slot_D, step)
    for chunk in plan.chunks:
        slots.advance_chunk(chunk.slot, chunk.tokens, step)
    return PackedLane(
        plan=plan,
        slot_Q=slot_Q,
        generation_Q=slots.generation_S[slot_Q],
        position_Q=slots.computed_S[slot_Q],
        chunk_generations=tuple([int(slots.generation_S[chunk.slot]) for chunk in plan.chunks]),
        chunk_starts=starts,
    )


def update_table(plan: LanePlan, lane: Lane, views: dict[str, np.ndarray]) -> None:
    """Give out the plan's pages and pack the block table entries that change.

    They always fit: a decode row changes one at most, and a chunk of c tokens at most c // K + 1, so all of them
    together at most T // K + R + Q, where the layout has T // K + 2 R + Q.
    """
    growing_N = plan.rows.growing_N
    if not len(growing_N) and not plan.chunks:
        return
    slot_N = np.concatenate((growing_N, [chunk.slot for chunk in plan.chunks])).astype(np.int64)
    count_N = np.ones(len(slot_N), np.int64)
    count_N[len(growing_N) :] = [chunk.pages for chunk in plan.chunks]
    slot_U, index_U, page_U = lane.pool.grow(slot_N, count_N)
    changes = len(slot_U)
    assert changes <= len(views["update_slot"]), (changes, len(views["update_slot"]))
    views["update_slot"][:changes] = slot_U
    views["update_index"][:changes] = index_U
    views["update_page"][:changes] = page_U


def pack_mixed(plan: LanePlan, lane: Lane, views: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Decode rows, then chunks, then which rows are sampled.

    Returns the slots of the sampled rows, and each chunk's packed start.
    """
    slot_D = plan.rows.slot_D
    count = len(slot_D)
    views["token"][:count] = -1  # the slot's last token, which only the device knows
    views["slot"][:count] = slot_D
    views["position"][:count] = lane.slots.computed_S[slot_D]
    views["num_decode"][0] = count
    sample_row = [*range(count)]
    sample_slot = slot_D.tolist()
    starts = []
    at = count
    for row, chunk in enumerate(plan.chunks):
        end = at + chunk.tokens
        stop = chunk.start + chunk.tokens
        views["token"][at:end] = chunk.sequence.token_ids[chunk.start : stop]
        views["slot"][at:end] = chunk.slot
        views["position"][at:end] = np.arange(chunk.start, stop)
        views["chunk_slot"][row] = chunk.slot
        views["chunk_start"][row] = at
        views["chunk_tokens"][row] = chunk.tokens
        views["chunk_position"][row] = chunk.start
        if chunk.sequence.wants_scores:
            prompt = chunk.sequence.num_prompt_tokens
            scored = chunk.sequence.token_ids[chunk.start + 1 : min(stop + 1, prompt)]
            views["target"][at : at + len(scored)] = scored
        if chunk.is_last:
            sample_row.append(end - 1)
            sample_slot.append(chunk.slot)
        starts.append(at)
        at = end
    views["sample_row"][: len(sample_row)] = sample_row
    views["sample_slot"][: len(sample_slot)] = sample_slot
    return np.array(sample_slot, np.int64), tuple(starts)
