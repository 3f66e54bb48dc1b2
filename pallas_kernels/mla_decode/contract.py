"""Absorbed latent attention of a row's new tokens over paged latents: takes absorbed queries, gives weighted latents.

Multi-query attention: all heads read the same rows. Cache layout: one pool [P, K, L]; the first `rank` dimensions of a
row are the latent, which is key and value at once, the rest is the rotated key.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "mla_decode"
MOST_TOKENS = 8  # of a row, that are new


@dataclass(frozen=True, slots=True)
class MlaDecodeShapes:
    """Static sizes of one call."""

    rows: int  # B
    heads: int  # H
    latent_dim: int  # L, of a cached row
    rank: int  # its first dimensions, the values
    page_tokens: int  # K
    max_pages: int  # M, of a block table row
    dtype: str
    tokens: int = 1  # S, query tokens of a row


def mla_decode(
    q_BHL: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    rank: int,
    scale: float,
    device: Device,
    implementation: str = registry.AUTO,
    invariant: bool = False,
) -> jax.Array:
    """softmax(scale q c^T) c[:, :rank] over the tokens c, of the pages that `table_BM[b]` names, up to q's own.

    The absorbed form of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): a head's query is
    its nope part times the key up-projection, then its rotated part; the caller applies the value up-projection.

    Args:
      q_BHL: absorbed queries, bf16 or fp32; any number of heads, a shard of the model's too. One token a row, or
        [B, S, H, L] with S of 1 to 8: token s stands at length - S + s and sees all tokens up to itself. One that would
        stand before 0 gives zeros.
      latent_PKL: the pool, in q's dtype; the new tokens' rows are already written. What lies past a row's length may
        be anything, NaN too: it never reaches an output.
      table_BM: int32 page ids; entries past the length may be anything.
      length_B: int32, tokens in the cache with the new ones; 0 is a padded row and gives zeros.
      rank: value dimensions, 1 to L.
      scale: of the scores, by the model's own head dimension (never L ** -0.5).
      device, implementation: see registry.select.
      invariant: a row's result is the same to the bit whatever the other rows hold, for one number of rows. Without,
        where a row is cut for several processors to share it depends on the lengths of all.

    Returns:
      [B, H, rank] or [B, S, H, rank] in q's dtype; scores and softmax are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "q", q_BHL, "B H L", "B S H L")
    require(OP, "the pool", latent_PKL, "P K L")
    require(OP, "table", table_BM, "B M", dtypes=INTEGERS)
    require(OP, "length", length_B, "B", dtypes=INTEGERS)
    rows, *more, heads, latent_dim = q_BHL.shape
    tokens = more[0] if more else 1
    if not 0 < tokens <= MOST_TOKENS:
        raise ValueError(f"{OP}: q has {tokens} query tokens a row, must be 1 to {MOST_TOKENS}.")
    if latent_PKL.shape[2] != latent_dim:
        raise ValueError(f"{OP}: the pool is {latent_PKL.shape}, must be [P, K, {latent_dim}] for these queries.")
    if not 0 < rank <= latent_dim:
        raise ValueError(f"{OP}: rank is {rank}, must be 1 to {latent_dim}, the dimensions of a cached row.")
    if q_BHL.dtype != latent_PKL.dtype:
        raise ValueError(f"{OP}: dtypes {q_BHL.dtype} and {latent_PKL.dtype} must be one.")
    if table_BM.shape[0] != rows or length_B.shape != (rows,):
        raise ValueError(f"{OP}: table {table_BM.shape} and length {length_B.shape} must have {rows} rows.")
    pages = (latent_PKL.shape[1], table_BM.shape[1])
    shapes = MlaDecodeShapes(rows, heads, latent_dim, rank, *pages, str(q_BHL.dtype), tokens)
    chosen = registry.select(OP, shapes, device, implementation)
    options = {"rank": rank, "scale": scale, "device": device, "invariant": invariant}
    return chosen.run(q_BHL, latent_PKL, table_BM, length_B, **options)


def fold_tokens(q: jax.Array) -> tuple[jax.Array, int]:
    """[B, S * H, L] of queries with or without an axis of tokens, and S: what a row holds is s * H + h."""
    if q.ndim == 3:
        return q, 1
    return q.reshape(q.shape[0], -1, q.shape[3]), q.shape[1]
