"""Root-mean-square norm (arXiv 1910.07467), in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import parameter


class RmsNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale over the last dimension, rounded once; transformers rounds twice."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.scale = parameter((width,), (None,), dtype)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """x in any float dtype -> the same shape in `dtype`, or in the scale's where none is given."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(dtype or self.scale.dtype)
