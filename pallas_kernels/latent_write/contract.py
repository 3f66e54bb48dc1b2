"""Writes the new latents of a step into their pages: takes rows from a latent attention layer.

Cache layout: one pool [P, K, L] a layer; a row of L dimensions is a token's latent after its norm, then its rotated
key, which all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device
from pallas_kernels.rotary import Rotary

OP = "latent_write"


@dataclass(frozen=True, slots=True)
class LatentWriteShapes:
    """Static sizes of one call."""

    rows: int  # T
    heads: int  # H
    head_dim: int  # E, of a query
    width: int  # W, of the projected rows
    rank: int  # of the latent
    page_tokens: int  # K
    rotary: Rotary
    dtype: str


def latent_write(
    latent_PKL: jax.Array,
    down_TW: jax.Array,
    scale_R: jax.Array,
    q_THE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    rotary: Rotary,
    eps: float,
    device: Device,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Norms a row's latent, turns its key, writes both to token `offset_T[t]` of page `page_T[t]`; turns queries too.

    Donate the pool and read only what this returns: then the write is in place. No two rows may name the same place.

    Args:
      latent_PKL: the pool.
      down_TW: projected rows in the pool's dtype; their last L columns are the latent and the key before that.
      scale_R: of the latent's norm, in the rows' dtype; R, its size, is the latent's.
      q_THE: queries in the rows' dtype; the last rotary.dims of a head's dimensions turn.
      cos_TC, sin_TC: fp32, of each row's position; C = rotary.dims / 2.
      page_T, offset_T: int32; a row whose page is the number of pages P (or any other page outside the pool, -1 too)
        is not written, only its queries are returned.
      rotary: how the L - R dimensions of the key pair, all of which turn. eps: of the norm.
      device, implementation: see registry.select.

    Returns:
      The turned part of the queries, [T, H, rotary.dims], in their dtype, and the pool.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "the pool", latent_PKL, "P K L")
    require(OP, "down", down_TW, "T W")
    require(OP, "scale", scale_R, "R")
    require(OP, "q", q_THE, "T H E")
    for name, array in (("page", page_T), ("offset", offset_T)):
        require(OP, name, array, "T", dtypes=INTEGERS)
    _, page_tokens, latent_dim = latent_PKL.shape
    rows, width = down_TW.shape
    heads, head_dim = q_THE.shape[1:]
    rank = scale_R.shape[0]
    if not latent_PKL.dtype == down_TW.dtype == q_THE.dtype == scale_R.dtype:
        given = f"pool {latent_PKL.dtype}, rows {down_TW.dtype}, queries {q_THE.dtype} and scale {scale_R.dtype}"
        raise ValueError(f"{OP}: {given} must have one dtype.")
    if rotary.dims != latent_dim - rank:
        raise ValueError(f"{OP}: {rotary.dims} dimensions turn, must be the pool's {latent_dim} less {rank}.")
    rotary.check(OP, head_dim)
    if width < latent_dim or q_THE.shape[0] != rows:
        raise ValueError(f"{OP}: rows are {down_TW.shape}, must be [{q_THE.shape[0]}, {latent_dim} or more].")
    for name, array in (("cos", cos_TC), ("sin", sin_TC)):
        if array.shape != (rows, rotary.dims // 2) or array.dtype != jnp.float32:
            raise ValueError(
                f"{OP}: {name} is {array.dtype} {array.shape}, must be float32 {(rows, rotary.dims // 2)}."
            )
    if page_T.shape != (rows,) or offset_T.shape != (rows,):
        raise ValueError(f"{OP}: page {page_T.shape} and offset {offset_T.shape} must be {(rows,)}.")
    shapes = LatentWriteShapes(
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        width=width,
        rank=rank,
        page_tokens=page_tokens,
        rotary=rotary,
        dtype=str(latent_PKL.dtype),
    )
    chosen = registry.select(OP, shapes, device, implementation)
    arrays = (latent_PKL, down_TW, scale_R, q_THE, cos_TC, sin_TC, page_T, offset_T)
    return chosen.run(*arrays, rotary=rotary, eps=eps)
