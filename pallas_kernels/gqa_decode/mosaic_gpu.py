"""gqa_decode on Hopper: cuts the pages into equal parts and runs the two kernels of kernel.py."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.gqa_decode.kernel import PAGE_TOKENS, Tuning, decode
from pallas_kernels.split import split_pages

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


def tuning_for(head_dim: int) -> Tuning:
    """Pages of half the width are half the bytes: twice as many are kept in flight."""
    return Tuning(stages=3 * 128 // head_dim)


# Under jit of its own, the kernels of all layers are traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "device", "tuning", "interpret"))
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
    B, N, G, E = q_BNGE.shape
    tuning = tuning or tuning_for(E)
    P, _, K, _ = k_PNKE.shape
    # XLA fuses the padding into whatever made the queries.
    q_UHE = jnp.pad(q_BNGE.reshape(B * N, G, E), ((0, 0), (0, -G % 8), (0, 0)))
    out_UGE = decode(
        q_UHE,
        k_PNKE.reshape(P * N, K, E),
        v_PNKE.reshape(P * N, K, E),
        table_BM,
        length_B,
        split_pages(length_B, kv_heads=N, page_tokens=K, parts=tuning.parts, min_pages=tuning.min_pages),
        group=G,
        scale=scale,
        tuning=tuning,
        interpret=interpret,
    )
    return out_UGE.reshape(B, N, G, E)
