"""mla_decode on Hopper: cuts the pages into equal parts, one kernel for few heads or many, then the merge."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.mla_decode import few_heads, many_heads
from pallas_kernels.mla_decode.common import LATENT_DIM, PAGE_TOKENS, RANK, Tuning
from pallas_kernels.mla_decode.contract import MlaDecodeShapes
from pallas_kernels.mla_decode.merge import merge
from pallas_kernels.split import split_pages

FEW_HEADS = 32  # beyond, heads are wgmma's rows and no longer its columns
_MOST_HEADS = 128
_SMS = 132


def why_not(shapes: MlaDecodeShapes, device: Device) -> str | None:
    """None, or what the kernels lack for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if (shapes.rank, shapes.latent_dim) != (RANK, LATENT_DIM):
        return f"a cached row has {shapes.rank} of {shapes.latent_dim} dimensions, must be {RANK} of {LATENT_DIM}."
    if shapes.heads > _MOST_HEADS:
        return f"there are {shapes.heads} heads, must be {_MOST_HEADS} at most."
    return None


def tuning_for(heads: int) -> Tuning:
    """One CTA an SM. More heads leave less shared memory for the ring, and more rows for the merge."""
    if heads <= FEW_HEADS:
        return Tuning(parts=_SMS, slots=7 if heads <= 24 else 6)
    return Tuning(parts=_SMS // -(-heads // many_heads.BLOCK_HEADS), merge_items=(4, 8), merge_heads=2)


# Under jit of its own, the kernels of all layers are traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("rank", "scale", "device", "tuning", "interpret"))
def run(
    q_BHL: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    rank: int,
    scale: float,
    device: Device,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU."""
    heads = q_BHL.shape[1]
    tuning = tuning or tuning_for(heads)
    split = split_pages(length_B, kv_heads=1, page_tokens=PAGE_TOKENS, parts=tuning.parts, min_pages=tuning.min_pages)
    few = heads <= FEW_HEADS
    # Few heads are wgmma's columns: 8 would cost what 16 do, and layout inference fails on them. Many are its rows.
    padded = max(16, heads + -heads % 8) if few else heads + -heads % many_heads.BLOCK_HEADS
    # In two parts, which the caller has joined: XLA drops both the joining and this cutting.
    q_parts = [jnp.pad(part, ((0, 0), (0, padded - heads), (0, 0))) for part in jnp.split(q_BHL, [rank], axis=2)]
    arrays = (*q_parts, latent_PKL, table_BM, length_B, split)
    options = {"tuning": tuning, "interpret": interpret}
    if few:
        out_BHR, part_IHR, lse_IH = few_heads.partials(*arrays, heads=heads, scale=scale, **options)
    else:
        out_BHR, part_IHR, lse_IH = many_heads.partials(*arrays, scale=scale, **options)
    return merge(out_BHR, part_IHR, lse_IH, split, **options)[:, :heads]
