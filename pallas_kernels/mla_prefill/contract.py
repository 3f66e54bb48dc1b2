"""Expanded causal attention of chunks of prompts over paged latents: takes packed queries, gives each head its values.

Cache layout as in mla_decode: one pool [P, K, L], L = rank + rope dimensions. Here `key_up_HNR` and `value_up_HVR` end
in the rank, while `table_RM` and the chunk arrays begin with the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "mla_prefill"


@dataclass(frozen=True, slots=True)
class MlaPrefillShapes:
    """Static sizes of one call."""

    tokens: int  # T, packed rows
    chunks: int  # R
    heads: int  # H
    nope_dim: int
    rope_dim: int
    value_dim: int  # V
    rank: int
    page_tokens: int  # K
    max_pages: int  # M, of a block table row
    dtype: str


def mla_prefill(
    q_THE: jax.Array,
    latent_PKL: jax.Array,
    key_up_HNR: jax.Array,
    value_up_HVR: jax.Array,
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
    For a cached row [c ; kp] (rank and rope dimensions) and head h the key is [key_up[h] c ; kp], the value
    value_up[h] c: the expanded form of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
      q_THE: queries of all chunks, packed, bf16 or fp32; E = nope dimensions, then the rotated rope dimensions.
      latent_PKL: the pool, in q's dtype. Rows past a chunk's end may be anything, NaN too.
      key_up_HNR: [H, nope, rank], in q's dtype; the heads may be a shard of the model's.
      value_up_HVR: [H, V, rank], in q's dtype.
      table_RM: int32 page ids of each chunk's request; entries past its end may be anything.
      start_R, tokens_R, position_R: int32; tokens 0 is an unused chunk. Chunks do not overlap.
      scale: of the scores, by the model's own head dimension.
      device, implementation: see registry.select.

    Returns:
      [T, H, V] in q's dtype, zeros for rows of no chunk; scores and softmax are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "q", q_THE, "T H E")
    require(OP, "the pool", latent_PKL, "P K L")
    require(OP, "key_up", key_up_HNR, "H nope rank")
    require(OP, "value_up", value_up_HVR, "H V rank")
    require(OP, "table", table_RM, "R M", dtypes=INTEGERS)
    tokens, heads, head_dim = q_THE.shape
    chunks = table_RM.shape[0]
    _, nope_dim, rank = key_up_HNR.shape
    value_dim = value_up_HVR.shape[1]
    rope_dim = head_dim - nope_dim
    if key_up_HNR.shape[0] != heads or rope_dim < 0:
        raise ValueError(f"{OP}: key_up is {key_up_HNR.shape}, must be [{heads}, at most {head_dim}, rank].")
    if value_up_HVR.shape != (heads, value_dim, rank):
        raise ValueError(f"{OP}: value_up is {value_up_HVR.shape}, must be [{heads}, V, {rank}] as key_up says.")
    if latent_PKL.shape[2] != rank + rope_dim:
        raise ValueError(f"{OP}: the pool is {latent_PKL.shape}, must be [P, K, {rank} + {rope_dim}].")
    if not q_THE.dtype == latent_PKL.dtype == key_up_HNR.dtype == value_up_HVR.dtype:
        given = f"{q_THE.dtype}, {latent_PKL.dtype}, {key_up_HNR.dtype}, {value_up_HVR.dtype}"
        raise ValueError(f"{OP}: dtypes {given} must be one.")
    for name, array in (("start", start_R), ("tokens", tokens_R), ("position", position_R)):
        require(OP, name, array, "R", dtypes=INTEGERS)
        if array.shape != (chunks,):
            raise ValueError(f"{OP}: {name} is {array.shape}, must be {(chunks,)}, one a row of the table.")
    page_tokens, max_pages = latent_PKL.shape[1], table_RM.shape[1]
    sizes = (tokens, chunks, heads, nope_dim, rope_dim, value_dim, rank, page_tokens, max_pages)
    chosen = registry.select(OP, MlaPrefillShapes(*sizes, str(q_THE.dtype)), device, implementation)
    arrays = (q_THE, latent_PKL, key_up_HNR, value_up_HVR, table_RM, start_R, tokens_R, position_R)
    return chosen.run(*arrays, scale=scale, device=device)
