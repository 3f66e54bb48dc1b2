"""A lane, one rank of data parallelism: request slots and cache pages of its own, which no other lane ever touches."""

from __future__ import annotations

from jaxserve.batch import Shape
from jaxserve.engine.pages import PagePool
from jaxserve.engine.prefix import PrefixCache
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.slots import SlotTable


class Lane:
    """Slots and pages. A step runs all lanes, so all pools see every step."""

    def __init__(self, index: int, shape: Shape, eviction: str | None = None) -> None:
        """`eviction`: the rule of the prefix cache; None: there is none."""
        self.index = index
        self.slots = SlotTable(shape.num_slots)
        self.writers: dict[int, Sequence] = {}  # by slot: whose prompts collected steps have not written to the end
        prefix = None if eviction is None else PrefixCache(shape.num_pages, shape.page_size_tokens, eviction)
        self.pool = PagePool(shape, prefix)

    def check(self) -> None:
        """Raise AssertionError unless pages and slots add up."""
        self.pool.check()
        slots = self.slots
        held = sum(sequence is not None for sequence in slots.sequences)
        if held != slots.occupied:
            raise AssertionError(
                f"lane {self.index}: slots {len(slots.sequences)} = held {held} + free {len(slots.free)}"
            )
        for slot, sequence in enumerate(slots.sequences):
            if sequence is not None and (sequence.lane, sequence.slot) != (self.index, slot):
                raise AssertionError(
                    f"lane {self.index} slot {slot}: its sequence believes to be in lane {sequence.lane} slot "
                    f"{sequence.slot}"
                )
        for slot in slots.free:
            if self.pool.owned_S[slot] or slots.decoding_S[slot]:
                raise AssertionError(f"lane {self.index}: free slot {slot} owns {self.pool.owned_S[slot]} pages")
