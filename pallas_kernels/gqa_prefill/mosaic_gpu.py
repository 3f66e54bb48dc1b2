"""gqa_prefill on Hopper: cuts chunks into query tiles and runs the kernel of kernel.py on them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill.contract import GqaPrefillShapes
from pallas_kernels.gqa_prefill.kernel import PAGE_TOKENS, Tuning, prefill
from pallas_kernels.query_tiles import TILE_TOKENS, cut_tiles


def why_not(shapes: GqaPrefillShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if shapes.head_dim not in (64, 128):
        return f"head dimension is {shapes.head_dim}, must be 64 or 128."
    return None


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "device", "tuning", "interpret"))
def run(
    q_TNGE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_RM: jax.Array,
    start_R: jax.Array,
    tokens_R: jax.Array,
    position_R: jax.Array,
    *,
    scale: float,
    device: Device,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernel in the interpreter, on a CPU."""
    T, N, G, E = q_TNGE.shape
    P, _, K, _ = k_PNKE.shape
    # A tile's rows are read whole, so there must be as many.
    q_THE = jnp.pad(q_TNGE.reshape(T, N * G, E), ((0, max(0, TILE_TOKENS - T)), (0, 0), (0, 0)))
    out_THE = prefill(
        q_THE,
        k_PNKE.reshape(P * N, K, E),
        v_PNKE.reshape(P * N, K, E),
        table_RM,
        cut_tiles(start_R, tokens_R, position_R, tokens=q_THE.shape[0]),
        kv_heads=N,
        scale=scale,
        tuning=tuning or Tuning(),
        interpret=interpret,
    )
    return out_THE[:T].reshape(T, N, G, E)
