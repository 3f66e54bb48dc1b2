"""The gated feed-forward block (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import parameter, product, project


class GatedMlp(nnx.Module):
    """down(silu(gate x) * up x); gate and up are one weight, so that they are one product.

    `shards`: over how many devices the width is cut. Only an uncut weight may be flattened to a matrix: the rows of a
    cut one would not be one range a device, and XLA would gather the whole weight at every step.
    """

    def __init__(self, hidden: int, width: int, dtype: jnp.dtype, shards: int = 1) -> None:
        self.shards = shards
        self.gate_up = parameter((2, width, hidden), (None, "mlp", "embed"), dtype)
        self.down = parameter((hidden, width), ("embed", "mlp"), dtype)

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        both = project(x_TD, self.gate_up[...]) if self.shards == 1 else product(x_TD, self.gate_up[...])
        return project(jax.nn.silu(both[:, 0]) * both[:, 1], self.down[...])
