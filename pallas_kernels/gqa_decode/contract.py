"""Attention of one new token a row over paged keys and values: takes queries from an attention layer, gives it heads.

Cache layout: one pool for keys, one for values, [P, N, K, E]: within a page the rows of one kv head lie together, so a
page of a head is one contiguous block. NOTES.md of this folder says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.device import Device

OP = "gqa_decode"


@dataclass(frozen=True, slots=True)
class GqaDecodeShapes:
    """Static sizes of one call."""

    rows: int  # B
    kv_heads: int  # N
    group: int  # G, query heads a kv head
    head_dim: int  # E
    page_tokens: int  # K
    max_pages: int  # M, of a block table row
    dtype: str


def gqa_decode(
    q_BNGE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """softmax(scale q k^T) v over the first `length_B[b]` tokens of the pages that `table_BM[b]` names.

    Args:
      q_BNGE: queries, bf16 or fp32.
      k_PNKE, v_PNKE: the pools, in q's dtype; the new token's row is already written. What lies past a row's length
        may be anything, NaN too: it never reaches an output.
      table_BM: int32 page ids; entries past the length may be anything.
      length_B: int32, tokens in the cache with the new one; 0 is a padded row and gives zeros.
      scale: of the scores, commonly E ** -0.5.
      device, implementation: see registry.select.

    Returns:
      [B, N, G, E] in q's dtype; scores and softmax are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    rows, kv_heads, group, head_dim = q_BNGE.shape
    if v_PNKE.shape != k_PNKE.shape:
        raise ValueError(f"{OP}: keys {k_PNKE.shape} and values {v_PNKE.shape} must have one shape.")
    if k_PNKE.shape[1] != kv_heads or k_PNKE.shape[3] != head_dim:
        raise ValueError(f"{OP}: pools are {k_PNKE.shape}, must be [P, {kv_heads}, K, {head_dim}] for these queries.")
    if not q_BNGE.dtype == k_PNKE.dtype == v_PNKE.dtype:
        raise ValueError(f"{OP}: dtypes {q_BNGE.dtype}, {k_PNKE.dtype}, {v_PNKE.dtype} must be one.")
    if table_BM.shape[0] != rows or length_B.shape != (rows,):
        raise ValueError(f"{OP}: table {table_BM.shape} and length {length_B.shape} must have {rows} rows.")
    shapes = GqaDecodeShapes(rows, kv_heads, group, head_dim, k_PNKE.shape[2], table_BM.shape[1], str(q_BNGE.dtype))
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(q_BNGE, k_PNKE, v_PNKE, table_BM, length_B, scale=scale, device=device)
