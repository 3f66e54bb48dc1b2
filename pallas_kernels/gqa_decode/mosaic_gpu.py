"""gqa_decode on Hopper: pads the group, cuts the pages into parts, and runs the two kernels of kernel.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.gqa_decode.kernel import PAGE_TOKENS, Tuning, merge, partial_attention
from pallas_kernels.gqa_decode.split import split_pages

_LARGEST_GROUP = 64


def why_not(shapes: GqaDecodeShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if shapes.head_dim not in (64, 128):
        return f"head dimension is {shapes.head_dim}, must be 64 or 128."
    if shapes.group > _LARGEST_GROUP:
        return f"a kv head has {shapes.group} query heads, must be {_LARGEST_GROUP} at most."
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
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU."""
    tuning = tuning or Tuning()
    B, N, G, E = q_BNGE.shape
    P, _, K, _ = k_PNKE.shape
    heads = -(-G // 8) * 8
    q_UHE = jnp.pad(q_BNGE, ((0, 0), (0, 0), (0, heads - G), (0, 0))).reshape(B * N, heads, E)
    split = split_pages(length_B, kv_heads=N, page_tokens=K, parts=tuning.parts, min_pages=tuning.min_pages)
    o_IEH, lse_IH = partial_attention(
        q_UHE,
        k_PNKE.reshape(P * N, K, E),
        v_PNKE.reshape(P * N, K, E),
        table_BM,
        length_B,
        split,
        scale=scale,
        tuning=tuning,
        interpret=interpret,
    )
    out_UHE = merge(o_IEH, lse_IH, split, dtype=q_BNGE.dtype, tuning=tuning, interpret=interpret)
    return out_UHE.reshape(B, N, heads, E)[:, :, :G]
