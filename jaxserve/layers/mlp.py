"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import add_up, parameter, project
from jaxserve.layers.paged import Paged
from jaxserve.layers.rows import Rows
from jaxserve.mesh import Placement


class GatedMlp(nnx.Module):
    """down(silu(gate x) * up x); gate and up are one weight, so that they are one product. The width may be cut."""

    def __init__(self, hidden: int, width: int, dtype: jnp.dtype, placement: Placement) -> None:
        self.axes = placement.axes("mlp", width)
        self.gate_up = parameter((2, width, hidden), (None, "mlp", "embed"), dtype)
        self.down = parameter((hidden, width), ("embed", "mlp"), dtype)

    def __call__(self, x_TD: jax.Array, paged: Paged | Rows) -> jax.Array:
        """[T, D] -> float32 [T, D]."""
        return add_up(self.partial(x_TD, paged), self.axes, x_TD.dtype)

    def partial(self, x_TD: jax.Array, paged: Paged | Rows) -> jax.Array:
        """This device's part of the sum over `axes`, float32."""
        # In bfloat16 XLA would round the exponential, one plus it, its inverse, and both products.
        both = project(x_TD, self.gate_up[...]).astype(jnp.float32)
        h_TF = (jax.nn.silu(both[:, 0]) * both[:, 1]).astype(x_TD.dtype)
        return paged.multiply(h_TF, self.down[...])
