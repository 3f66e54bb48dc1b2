"""Writes the new keys and values of a step into their pages: takes projected rows from an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device
from pallas_kernels.rotary import Rotary

OP = "kv_write"


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Norms of each head's query and key before they turn; both scales [E], in the rows' dtype."""

    q_scale_E: jax.Array
    k_scale_E: jax.Array
    eps: float


@dataclass(frozen=True, slots=True)
class KvWriteShapes:
    """Static sizes of one call."""

    rows: int  # T
    kv_heads: int  # N
    group: int  # G, query heads a kv head
    head_dim: int  # E
    page_tokens: int  # K
    rotary: Rotary
    bias: bool
    norm: bool
    dtype: str


def kv_write(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    qkv_TNSE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    rotary: Rotary,
    bias_NSE: jax.Array | None = None,
    norm: QkNorm | None = None,
    device: Device,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bias, norm of queries and keys, their rotation; then row t's key and value go to token `offset_T[t]` of page
    `page_T[t]`.

    Donate the pools and read only what this returns: then the write is in place. No two rows may name the same place.

    Args:
      k_PNKE, v_PNKE: the pools.
      qkv_TNSE: projected rows in the pools' dtype; of each kv head its G queries, then its key, then its value.
      cos_TC, sin_TC: fp32, of each row's position; C = rotary.dims / 2.
      page_T, offset_T: int32; a row whose page is the number of pages P (or any other page outside the pool, -1 too)
        is not written, only its queries are returned.
      rotary: which dimensions turn, and how they pair.
      bias_NSE: in the rows' dtype, added to them first, or None. norm: see QkNorm, or None. A form may round to the
        rows' dtype after each step, or once at the end.
      device, implementation: see registry.select.

    Returns:
      Queries [T, N, G, E] in the rows' dtype, and the two pools.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    for name, array, axes in (("k", k_PNKE, "P N K E"), ("v", v_PNKE, "P N K E"), ("qkv", qkv_TNSE, "T N S E")):
        require(OP, name, array, axes)
    for name, array in (("page", page_T), ("offset", offset_T)):
        require(OP, name, array, "T", dtypes=INTEGERS)
    _, kv_heads, page_tokens, head_dim = k_PNKE.shape
    rows, slots = qkv_TNSE.shape[0], qkv_TNSE.shape[2]
    if v_PNKE.shape != k_PNKE.shape or not k_PNKE.dtype == v_PNKE.dtype == qkv_TNSE.dtype:
        raise ValueError(
            f"{OP}: keys {k_PNKE.dtype} {k_PNKE.shape}, values {v_PNKE.dtype} {v_PNKE.shape} and rows "
            f"{qkv_TNSE.dtype} must have one dtype, the pools one shape."
        )
    if qkv_TNSE.shape != (rows, kv_heads, slots, head_dim) or slots < 3:
        raise ValueError(f"{OP}: rows are {qkv_TNSE.shape}, must be [T, {kv_heads}, G + 2, {head_dim}].")
    rotary.check(OP, head_dim)
    for name, array in (("cos", cos_TC), ("sin", sin_TC)):
        if array.shape != (rows, rotary.dims // 2) or array.dtype != jnp.float32:
            raise ValueError(
                f"{OP}: {name} is {array.dtype} {array.shape}, must be float32 {(rows, rotary.dims // 2)}."
            )
    if page_T.shape != (rows,) or offset_T.shape != (rows,):
        raise ValueError(f"{OP}: page {page_T.shape} and offset {offset_T.shape} must be {(rows,)}.")
    if bias_NSE is not None and bias_NSE.shape != qkv_TNSE.shape[1:]:
        raise ValueError(f"{OP}: bias is {bias_NSE.shape}, must be {qkv_TNSE.shape[1:]}.")
    if norm is not None and not norm.q_scale_E.shape == norm.k_scale_E.shape == (head_dim,):
        raise ValueError(f"{OP}: scales are {norm.q_scale_E.shape} and {norm.k_scale_E.shape}, must be {(head_dim,)}.")
    scales = () if norm is None else (norm.q_scale_E, norm.k_scale_E)
    for name, array in (("bias", bias_NSE), *(("scale", one) for one in scales)):
        if array is not None and array.dtype != qkv_TNSE.dtype:
            raise ValueError(f"{OP}: {name} is {array.dtype}, must be {qkv_TNSE.dtype} as the rows.")
    shapes = KvWriteShapes(
        rows=rows,
        kv_heads=kv_heads,
        group=slots - 2,
        head_dim=head_dim,
        page_tokens=page_tokens,
        rotary=rotary,
        bias=bias_NSE is not None,
        norm=norm is not None,
        dtype=str(k_PNKE.dtype),
    )
    chosen = registry.select(OP, shapes, device, implementation)
    arrays = (k_PNKE, v_PNKE, qkv_TNSE, cos_TC, sin_TC, page_T, offset_T)
    eps = None if norm is None else norm.eps
    return chosen.run(*arrays, bias_NSE=bias_NSE, scales_2E=scales, rotary=rotary, eps=eps)
