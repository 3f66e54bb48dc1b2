"""gqa_decode in plain XLA: what runs where no native kernel fits. It reads pages block by block, no dense copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.blockwise import attend
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes


def why_not(shapes: GqaDecodeShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    q: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    device: Device,
    invariant: bool = False,
) -> jax.Array:
    """See the contract. Every row is a tile of its query tokens.

    invariant: holds in any case: blocks have one size, and those past a row's end add exact zeros.
    """
    q_BSNGE = q if q.ndim == 5 else q[:, None]
    tokens = q_BSNGE.shape[1]
    visible_BS = length_B[:, None] - tokens + 1 + jnp.arange(tokens)
    out_BSNGE = attend(q_BSNGE, k_PNKE, v_PNKE, table_BM, visible_BS, scale=scale, device=device)
    return out_BSNGE.reshape(q.shape)
