"""kv_write in plain XLA: a fusion for queries and keys, one scatter a pool, in place on donated pools; fits always."""

from __future__ import annotations

import jax

from pallas_kernels.device import Device
from pallas_kernels.kv_write.contract import KvWriteShapes
from pallas_kernels.rotary import Rotary, normed, rotate


def why_not(shapes: KvWriteShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    qkv_TNSE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    bias_NSE: jax.Array | None,
    scales_2E: tuple[jax.Array, ...],
    rotary: Rotary,
    eps: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the contract."""
    if bias_NSE is not None:
        qkv_TNSE = qkv_TNSE + bias_NSE
    q, k, v = qkv_TNSE[:, :, :-2], qkv_TNSE[:, :, -2], qkv_TNSE[:, :, -1]
    if eps is not None:
        q, k = normed(q, scales_2E[0], eps), normed(k, scales_2E[1], eps)
    q, k = rotate(rotary, q, cos_TC, sin_TC), rotate(rotary, k, cos_TC, sin_TC)

    def write(pool_PNKE: jax.Array, rows_TNE: jax.Array) -> jax.Array:
        # Without wrap_negative_indices=False, page -1 would overwrite the last page in place of being dropped.
        return pool_PNKE.at[page_T, :, offset_T].set(rows_TNE, mode="drop", wrap_negative_indices=False)

    return q, write(k_PNKE, k), write(v_PNKE, v)
