"""latent_write in plain XLA: fusions for queries and rows, one scatter, in place on a donated pool; fits always."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.latent_write.contract import LatentWriteShapes
from pallas_kernels.rotary import Rotary, normed, rotate


def why_not(shapes: LatentWriteShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
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
) -> tuple[jax.Array, jax.Array]:
    """See the contract."""
    start = down_TW.shape[1] - latent_PKL.shape[2]
    latent, key = jnp.split(down_TW[:, start:], [scale_R.shape[0]], axis=1)
    row_TL = jnp.concatenate((normed(latent, scale_R, eps), rotate(rotary, key, cos_TC, sin_TC)), axis=1)
    turned = rotate(rotary, q_THE[:, :, q_THE.shape[2] - rotary.dims :], cos_TC, sin_TC)
    # Without wrap_negative_indices=False, page -1 would overwrite the last page in place of being dropped.
    place = latent_PKL.at[page_T, offset_T]
    return turned, place.set(row_TL, mode="drop", wrap_negative_indices=False)
