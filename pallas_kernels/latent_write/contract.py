"""Writes the new latents of a step into their pages: takes rows from a latent attention layer.

Cache layout: one pool [P, K, L] a layer; a row of L dimensions is a token's latent after its norm, then its rotated
key, which all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.device import Device

OP = "latent_write"


@dataclass(frozen=True, slots=True)
class LatentWriteShapes:
    """Static sizes of one call."""

    rows: int  # T
    latent_dim: int  # L
    page_tokens: int  # K
    dtype: str


def latent_write(
    latent_PKL: jax.Array,
    new_TL: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """Row t of the new latents goes to token `offset_T[t]` of page `page_T[t]`.

    Donate the pool and read only what this returns: then the write is in place. A row whose page is the number of
    pages P (or any other page outside the pool, -1 too) is dropped. No two rows of a call may name the same place.

    Args:
      latent_PKL: the pool.
      new_TL: the rows, cast to the pool's dtype.
      page_T, offset_T: int32.
      device, implementation: see registry.select.

    Returns:
      The pool with the rows written.

    Raises:
      ValueError: shapes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    _, page_tokens, latent_dim = latent_PKL.shape
    rows = new_TL.shape[0]
    if new_TL.shape != (rows, latent_dim):
        raise ValueError(f"{OP}: new is {new_TL.shape}, must be {(rows, latent_dim)} for this pool.")
    if page_T.shape != (rows,) or offset_T.shape != (rows,):
        raise ValueError(f"{OP}: page {page_T.shape} and offset {offset_T.shape} must be {(rows,)}.")
    shapes = LatentWriteShapes(rows, latent_dim, page_tokens, str(latent_PKL.dtype))
    return registry.select(OP, shapes, device, implementation).run(latent_PKL, new_TL, page_T, offset_T)
