"""gqa_decode in plain XLA: what runs where no native kernel fits. It reads pages block by block, no dense copy."""

from __future__ import annotations

import jax

from pallas_kernels.blockwise import attend
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes


def why_not(shapes: GqaDecodeShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    q_BNGE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    device: Device,
) -> jax.Array:
    """See the contract. Every row is a tile of one query token."""
    out = attend(q_BNGE[:, None], k_PNKE, v_PNKE, table_BM, length_B[:, None], scale=scale, device=device)
    return out[:, 0]
