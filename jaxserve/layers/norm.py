"""Root-mean-square norm (arXiv 1910.07467), statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import parameter


class RmsNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dimension; the product with scale in x's dtype, as HF."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.scale = parameter((width,), (None,), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * self.scale[...]
