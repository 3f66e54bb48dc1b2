"""Writes the new keys and values of a step into their pages: takes projected rows from an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.device import Device

OP = "kv_write"


@dataclass(frozen=True, slots=True)
class KvWriteShapes:
    """Static sizes of one call."""

    rows: int  # T
    kv_heads: int  # N
    head_dim: int  # E
    page_tokens: int  # K
    dtype: str


def kv_write(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    new_k_TNE: jax.Array,
    new_v_TNE: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    device: Device,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Row t of the new keys and values goes to token `offset_T[t]` of page `page_T[t]`.

    Donate the pages and read only what this returns: then the write is in place. A row whose page is the number of
    pages P (or any other page outside the pool) is dropped. No two rows of a call may name the same place.

    Args:
      k_PNKE, v_PNKE: the pools.
      new_k_TNE, new_v_TNE: the rows, cast to the pools' dtype.
      page_T, offset_T: int32.
      device, implementation: see registry.select.

    Returns:
      The two pools with the rows written.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    num_pages, kv_heads, page_tokens, head_dim = k_PNKE.shape
    rows = new_k_TNE.shape[0]
    if v_PNKE.shape != k_PNKE.shape or v_PNKE.dtype != k_PNKE.dtype:
        raise ValueError(f"kv_write: keys {k_PNKE.shape} and values {v_PNKE.shape} must have one shape and dtype.")
    for name, array in (("new_k", new_k_TNE), ("new_v", new_v_TNE)):
        if array.shape != (rows, kv_heads, head_dim):
            raise ValueError(f"kv_write: {name} is {array.shape}, must be {(rows, kv_heads, head_dim)}.")
    if page_T.shape != (rows,) or offset_T.shape != (rows,):
        raise ValueError(f"kv_write: page {page_T.shape} and offset {offset_T.shape} must be {(rows,)}.")
    shapes = KvWriteShapes(rows, kv_heads, head_dim, page_tokens, str(k_PNKE.dtype))
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(k_PNKE, v_PNKE, new_k_TNE, new_v_TNE, page_T, offset_T)
