"""From a Plan to a Batch: takes what `schedule` decided, moves the ledger on, gives installs and a vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.batch import Batch, Bucket, Install, Layout, Program, Shape
from jaxserve.engine.ledger import Ledger
from jaxserve.engine.schedule import Chunk, Plan
from jaxserve.engine.sequence import Sequence, make_install
from jaxserve.engine.slots import SlotTable


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A step that is ready for the device, and what `collect` must know of it.

    slot_Q, generation_Q, position_Q: the sampled rows' slots, the slots' generations then, and the position that the
    sampled token has in its sequence. The first `num_decode` are decode rows, then come the last chunks of prompts.
    """

    step: int
    batch: Batch
    installs: list[Install]
    flags: int
    slot_Q: np.ndarray
    generation_Q: np.ndarray
    position_Q: np.ndarray
    num_decode: int
    chunks: tuple[Chunk, ...]
    chunk_generations: tuple[int, ...]
    chunk_starts: tuple[int, ...]  # packed index of each chunk's first token

    @property
    def is_scored(self) -> bool:
        """Its chunks' tokens are scored."""
        return self.batch.bucket.program is Program.SCORED

    def alive(self, slots: SlotTable) -> list[Sequence]:
        """The sequences that the step has rows for and that still hold their slots."""
        pairs = [*zip(self.slot_Q[: self.num_decode].tolist(), self.generation_Q.tolist(), strict=False)]
        pairs += [(chunk.slot, was) for chunk, was in zip(self.chunks, self.chunk_generations, strict=True)]
        kept = [slots.sequences[slot] for slot, generation in pairs if slots.generation_S[slot] == generation]
        return [sequence for sequence in kept if sequence is not None]


class Packer:
    """Holds a padded vector and the field offsets of every bucket."""

    def __init__(self, shape: Shape, buckets: list[Bucket]) -> None:
        self.shape = shape
        self._templates: dict[Bucket, tuple[np.ndarray, list[tuple[str, slice]]]] = {}
        for bucket in buckets:
            layout = Layout(bucket, shape)
            places = [(f.name, slice(f.offset, f.offset + f.count)) for f in layout.fields.values()]
            self._templates[bucket] = layout.empty(), places

    def views(self, bucket: Bucket) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A fresh padded vector (the device may still read an older one) and its fields by name."""
        template, places = self._templates[bucket]
        vector = template.copy()
        return vector, {name: vector[where] for name, where in places}

    def apply(self, plan: Plan, ledger: Ledger, step: int) -> Packed | None:
        """Admit, preempt, give out pages, pack and advance the slots; None if the plan runs nothing."""
        installs = []
        for chunk in plan.chunks:
            if chunk.is_first:
                for waiting in plan.passed:
                    waiting.passed += waiting.arrival < chunk.sequence.arrival
                ledger.admit(chunk.sequence, chunk.slot)
                installs.append(make_install(chunk.sequence, chunk.slot))
        for slot in plan.preempt:
            ledger.preempt(slot)
        if plan.bucket is None:
            return None
        vector, views = self.views(plan.bucket)
        self._update_table(plan, ledger, views)
        if plan.bucket.program is Program.DECODE:
            slot_Q, starts = plan.decode_D, ()
            views["slot"][: len(slot_Q)] = slot_Q
            views["position"][: len(slot_Q)] = ledger.slots.computed_S[slot_Q]
        else:
            slot_Q, starts = pack_mixed(plan, ledger, views)
        flags = int(np.bitwise_or.reduce(ledger.slots.flag_S[slot_Q])) if len(slot_Q) else 0
        views["flags"][0] = flags
        slots = ledger.slots
        slots.advance_decode(plan.decode_D, step)
        for chunk in plan.chunks:
            slots.advance_chunk(chunk.slot, chunk.tokens, step)
        return Packed(
            step=step,
            batch=Batch(plan.bucket, vector),
            installs=installs,
            flags=flags,
            slot_Q=slot_Q,
            generation_Q=slots.generation_S[slot_Q],
            position_Q=slots.computed_S[slot_Q],
            num_decode=len(plan.decode_D),
            chunks=plan.chunks,
            chunk_generations=tuple([int(slots.generation_S[chunk.slot]) for chunk in plan.chunks]),
            chunk_starts=starts,
        )

    def _update_table(self, plan: Plan, ledger: Ledger, views: dict[str, np.ndarray]) -> None:
        """Give out the plan's pages and pack the block table entries that change.

        They always fit: a decode row changes one at most, and a chunk of c tokens at most c // K + 1, so all of them
        together at most T // K + R + Q, where the layout has T // K + 2 R + Q.
        """
        if not len(plan.growing_N) and not plan.chunks:
            return
        slot_N = np.concatenate((plan.growing_N, [chunk.slot for chunk in plan.chunks])).astype(np.int64)
        count_N = np.ones(len(slot_N), np.int64)
        count_N[len(plan.growing_N) :] = [chunk.pages for chunk in plan.chunks]
        slot_U, index_U, page_U = ledger.pool.grow(slot_N, count_N)
        changes = len(slot_U)
        assert changes <= len(views["update_slot"]), (changes, plan.bucket)
        views["update_slot"][:changes] = slot_U
        views["update_index"][:changes] = index_U
        views["update_page"][:changes] = page_U


def pack_mixed(plan: Plan, ledger: Ledger, views: dict[str, np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Decode rows, then chunks, then which rows are sampled.

    Returns the slots of the sampled rows, and each chunk's packed start.
    """
    count = len(plan.decode_D)
    views["token"][:count] = -1  # the slot's last token, which only the device knows
    views["slot"][:count] = plan.decode_D
    views["position"][:count] = ledger.slots.computed_S[plan.decode_D]
    views["num_decode"][0] = count
    if "target" in views:
        views["target"][...] = -1
    sample_row = [*range(count)]
    sample_slot = plan.decode_D.tolist()
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
        if "target" in views:
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
