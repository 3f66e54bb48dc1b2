"""Causal attention of chunks of prompts over paged keys and values: takes packed queries from an attention layer.

Cache layout as in gqa_decode: keys and values [P, N, K, E].
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "gqa_prefill"


@dataclass(frozen=True, slots=True)
class GqaPrefillShapes:
    """Static sizes of one call."""

    tokens: int  # T, packed rows
    chunks: int  # R
    kv_heads: int  # N
    group: int  # G, query heads a kv head
    head_dim: int  # E
    page_tokens: int  # K
    max_pages: int  # M, of a block table row
    dtype: str


def gqa_prefill(
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
    implementation: str = registry.AUTO,
) -> jax.Array:
    """Chunk r is packed rows start .. start + tokens - 1; its first token stands at `position_R[r]` of its request.

    A token attends to all tokens of its request up to itself. All of them, the chunk's own too, are in pages already.

    Args:
      q_TNGE: queries of all chunks, packed, bf16 or fp32.
      k_PNKE, v_PNKE: the pools, in q's dtype. Rows past a chunk's end may be anything, NaN too.
      table_RM: int32 page ids of each chunk's request; entries past its end may be anything.
      start_R, tokens_R, position_R: int32; tokens 0 is an unused chunk. Chunks do not overlap.
      scale: of the scores.
      device, implementation: see registry.select.

    Returns:
      [T, N, G, E] in q's dtype, zeros for rows of no chunk; scores and softmax are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "q", q_TNGE, "T N G E")
    for name, pool in (("k", k_PNKE), ("v", v_PNKE)):
        require(OP, name, pool, "P N K E")
    require(OP, "table", table_RM, "R M", dtypes=INTEGERS)
    tokens, kv_heads, group, head_dim = q_TNGE.shape
    chunks = table_RM.shape[0]
    if v_PNKE.shape != k_PNKE.shape:
        raise ValueError(f"{OP}: keys {k_PNKE.shape} and values {v_PNKE.shape} must have one shape.")
    if k_PNKE.shape[1] != kv_heads or k_PNKE.shape[3] != head_dim:
        raise ValueError(f"{OP}: pools are {k_PNKE.shape}, must be [P, {kv_heads}, K, {head_dim}] for these queries.")
    if not q_TNGE.dtype == k_PNKE.dtype == v_PNKE.dtype:
        raise ValueError(f"{OP}: dtypes {q_TNGE.dtype}, {k_PNKE.dtype}, {v_PNKE.dtype} must be one.")
    for name, array in (("start", start_R), ("tokens", tokens_R), ("position", position_R)):
        require(OP, name, array, "R", dtypes=INTEGERS)
        if array.shape != (chunks,):
            raise ValueError(f"{OP}: {name} is {array.shape}, must be {(chunks,)}, one a row of the table.")
    shapes = GqaPrefillShapes(
        tokens, chunks, kv_heads, group, head_dim, k_PNKE.shape[2], table_RM.shape[1], str(q_TNGE.dtype)
    )
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(q_TNGE, k_PNKE, v_PNKE, table_RM, start_R, tokens_R, position_R, scale=scale, device=device)
