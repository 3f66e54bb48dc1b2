"""mla_decode on Hopper: cuts the pages into equal parts, one kernel for few queries a row and one for many."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.mla_decode import few_heads, many_turns
from pallas_kernels.mla_decode.common import LATENT_DIM, PAGE_TOKENS, RANK, Tuning
from pallas_kernels.mla_decode.contract import MlaDecodeShapes, fold_tokens
from pallas_kernels.mla_decode.many_common import BLOCK_QUERIES
from pallas_kernels.split import split_pages, split_rows

FEW_QUERIES = 32  # heads x query tokens of a row; beyond, they are wgmma's rows and no longer its columns
_MOST_HEADS = 128
# Of 132 SMs: a power of two cuts the batches that the engine makes at the borders of their rows wherever these are of
# one length, and a CTA with two halves of rows is slower than four idle SMs cost (NOTES.md).
_PARTS = 128


def why_not(shapes: MlaDecodeShapes, device: Device) -> str | None:
    """None, or what the kernels lack for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if device.sms < _PARTS:  # parts of a row wait for each other: all must run at once
        return f"it needs a GPU of {_PARTS} multiprocessors at least, this one has {device.sms}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if (shapes.rank, shapes.latent_dim) != (RANK, LATENT_DIM):
        return f"a cached row has {shapes.rank} of {shapes.latent_dim} dimensions, must be {RANK} of {LATENT_DIM}."
    if shapes.heads > _MOST_HEADS:
        return f"there are {shapes.heads} heads, must be {_MOST_HEADS} at most."
    return None


def tuning_for(queries: int) -> Tuning:
    """About one CTA an SM. queries: heads x query tokens of a row; more leave less shared memory for the ring."""
    if queries <= FEW_QUERIES:
        return Tuning(parts=_PARTS, min_pages=1, slots=7 if queries <= 24 else 6)
    blocks = -(-queries // BLOCK_QUERIES)
    return Tuning(parts=_PARTS // blocks, multicast=blocks % 2 == 0)


# Under jit of its own, the kernels of all layers are traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("rank", "scale", "device", "invariant", "tuning", "interpret"))
def run(
    q_BHL: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    rank: int,
    scale: float,
    device: Device,
    invariant: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU."""
    shape = (*q_BHL.shape[:-1], rank)
    q_BQL, tokens = fold_tokens(q_BHL)
    queries = q_BQL.shape[1]
    tuning = tuning or tuning_for(queries)
    few = queries <= FEW_QUERIES
    cut = {"kv_heads": 1, "page_tokens": PAGE_TOKENS, "parts": tuning.parts, "min_pages": tuning.min_pages}
    split = split_rows(length_B, **cut) if invariant else split_pages(length_B, **cut, align=not few)
    # Few are wgmma's columns: 8 would cost what 16 do, and layout inference fails on them. Many are its rows.
    padded = max(16, queries + -queries % 8) if few else queries + -queries % BLOCK_QUERIES
    # In two parts, which the caller has joined: XLA drops both the joining and this cutting.
    q_parts = [jnp.pad(part, ((0, 0), (0, padded - queries), (0, 0))) for part in jnp.split(q_BQL, [rank], axis=2)]
    arrays = (*q_parts, latent_PKL, table_BM, length_B, split)
    decode = few_heads.decode if few else many_turns.decode
    options = {"queries": queries, "tokens": tokens, "scale": scale, "tuning": tuning, "interpret": interpret}
    return decode(*arrays, **options)[:, :queries].reshape(shape)
