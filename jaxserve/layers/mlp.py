"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import parameter, project
from jaxserve.mesh import Placement, total


class GatedMlp(nnx.Module):
    """down(silu(gate x) * up x); gate and up are one weight, so that they are one product. The width may be cut."""

    def __init__(self, hidden: int, width: int, dtype: jnp.dtype, placement: Placement) -> None:
        self.axes = placement.axes("mlp", width)
        self.gate_up = parameter((2, width, hidden), (None, "mlp", "embed"), dtype)
        self.down = parameter((hidden, width), ("embed", "mlp"), dtype)

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        return total(self.partial(x_TD), self.axes)

    def partial(self, x_TD: jax.Array) -> jax.Array:
        """This device's part of the sum over `axes`."""
        both = project(x_TD, self.gate_up[...])
        return project(jax.nn.silu(both[:, 0]) * both[:, 1], self.down[...])
