"""What the kernels of mla_prefill share: the page, and what may be tuned."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    block: int = 128  # tokens of a key block
    stages: int = 2  # key blocks in flight
    turns: bool = True  # the warpgroups alternate in the tensor cores
    ctas: int = 132  # the multiprocessors
    compute_registers: int = 240
    copy_registers: int = 24
    up_columns: int = 64  # of the rank, that a stage of the expansion's weights has

    @classmethod
    def of(cls, width: int) -> Tuning:
        """width: nope and value dimensions of a head together; two stages of key blocks must fit in shared memory."""
        return cls() if width <= 256 else cls(block=64)
