"""latent_write as one XLA scatter, which is in place on a donated pool; fits every shape and device."""

from __future__ import annotations

import jax

from pallas_kernels.device import Device
from pallas_kernels.latent_write.contract import LatentWriteShapes


def why_not(shapes: LatentWriteShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(latent_PKL: jax.Array, new_TL: jax.Array, page_T: jax.Array, offset_T: jax.Array) -> jax.Array:
    """See the contract."""
    # Without wrap_negative_indices=False, page -1 would overwrite the last page in place of being dropped.
    place = latent_PKL.at[page_T, offset_T]
    return place.set(new_TL.astype(latent_PKL.dtype), mode="drop", wrap_negative_indices=False)
