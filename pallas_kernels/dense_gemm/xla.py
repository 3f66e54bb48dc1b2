"""dense_gemm in plain XLA: one dot; fits always."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_gemm.contract import DenseGemmShapes
from pallas_kernels.device import Device


def why_not(shapes: DenseGemmShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(x_TK: jax.Array, w_NK: jax.Array, lengths_B: jax.Array, *, out_dtype: jnp.dtype) -> jax.Array:
    """[T, N]; see the contract."""
    # Full fp32 products where the inputs are fp32; a GPU would take TF32 otherwise.
    precision = lax.Precision.HIGHEST if x_TK.dtype == jnp.float32 else None
    over_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_TK, w_NK, over_last, precision=precision, preferred_element_type=out_dtype)
