"""Attention of new tokens, 1 to 8 a row, over paged keys and values: takes a layer's queries, gives it heads.

Cache layout: one pool for keys, one for values, [P, N, K, E]: within a page the rows of one kv head lie together, so a
page of a head is one contiguous block. NOTES.md of this folder says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "gqa_decode"
MOST_TOKENS = 8


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
    tokens: int = 1  # S, query tokens a row


def gqa_decode(
    q: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    device: Device,
    implementation: str = registry.AUTO,
    invariant: bool = False,
) -> jax.Array:
    """softmax(scale q k^T) v over the pages that `table_BM[b]` names, causal where a row has several query tokens.

    Args:
      q: queries [B, N, G, E], one token a row, or [B, S, N, G, E], S tokens, 1 to 8; bf16 or fp32. Token s stands at
        position length - S + s and sees the tokens up to its own; one whose position is negative gives zeros.
      k_PNKE, v_PNKE: the pools, in q's dtype; the query tokens' rows are already written. What lies past a row's length
        may be anything, NaN too: it never reaches an output.
      table_BM: int32 page ids; entries past the length may be anything.
      length_B: int32, tokens in the cache with the query tokens; 0 is a padded row and gives zeros.
      scale: of the scores, commonly E ** -0.5.
      device, implementation: see registry.select.
      invariant: a row's result is the same to the bit whatever the other rows hold, for one number of rows. Without,
        where a row is cut for several processors to share it depends on the lengths of all.

    Returns:
      As q in shape and dtype; scores and softmax are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "q", q, "B N G E", "B S N G E")
    for name, pool in (("k", k_PNKE), ("v", v_PNKE)):
        require(OP, name, pool, "P N K E")
    require(OP, "table", table_BM, "B M", dtypes=INTEGERS)
    require(OP, "length", length_B, "B", dtypes=INTEGERS)
    rows, tokens, kv_heads, group, head_dim = q.shape if q.ndim == 5 else (q.shape[0], 1, *q.shape[1:])
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{OP}: q has {tokens} query tokens a row, must be 1 to {MOST_TOKENS}.")
    if v_PNKE.shape != k_PNKE.shape:
        raise ValueError(f"{OP}: keys {k_PNKE.shape} and values {v_PNKE.shape} must have one shape.")
    if k_PNKE.shape[1] != kv_heads or k_PNKE.shape[3] != head_dim:
        raise ValueError(f"{OP}: pools are {k_PNKE.shape}, must be [P, {kv_heads}, K, {head_dim}] for these queries.")
    if not q.dtype == k_PNKE.dtype == v_PNKE.dtype:
        raise ValueError(f"{OP}: dtypes {q.dtype}, {k_PNKE.dtype}, {v_PNKE.dtype} must be one.")
    if table_BM.shape[0] != rows or length_B.shape != (rows,):
        raise ValueError(f"{OP}: table {table_BM.shape} and length {length_B.shape} must have {rows} rows.")
    sizes = (k_PNKE.shape[2], table_BM.shape[1], str(q.dtype), tokens)
    shapes = GqaDecodeShapes(rows, kv_heads, group, head_dim, *sizes)
    chosen = registry.select(OP, shapes, device, implementation)
    options = {"scale": scale, "device": device, "invariant": invariant}
    return chosen.run(q, k_PNKE, v_PNKE, table_BM, length_B, **options)
