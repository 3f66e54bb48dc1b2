"""kv_write as one XLA scatter a pool, which is in place on donated pools; fits every shape and device."""

from __future__ import annotations

import jax

from pallas_kernels.device import Device
from pallas_kernels.kv_write.contract import KvWriteShapes


def why_not(shapes: KvWriteShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    new_k_TNE: jax.Array,
    new_v_TNE: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See the contract."""

    def write(pool_PNKE: jax.Array, rows_TNE: jax.Array) -> jax.Array:
        # Without wrap_negative_indices=False, page -1 would overwrite the last page in place of being dropped.
        place = pool_PNKE.at[page_T, :, offset_T]
        return place.set(rows_TNE.astype(pool_PNKE.dtype), mode="drop", wrap_negative_indices=False)

    return write(k_PNKE, new_k_TNE), write(v_PNKE, new_v_TNE)
