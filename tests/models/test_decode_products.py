"""Which products of a step go to the decode kernel: down, of few rows that all decode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.layers.mlp import GatedMlp
from jaxserve.layers.paged import Chunks, Paged
from jaxserve.mesh import Placement
from pallas_kernels.device import Device

HIDDEN, WIDTH = 2048, 8192


@pytest.mark.parametrize(
    ("rows", "chunks", "device", "kernels"),
    [
        (16, False, Device("gpu", "9.0"), 1),
        (64, False, Device("gpu", "9.0"), 1),
        (128, False, Device("gpu", "9.0"), 0),
        (16, True, Device("gpu", "9.0"), 0),
        (16, False, Device("gpu", "8.0"), 0),
    ],
)
def test_few_rows_that_decode(rows: int, chunks: bool, device: Device, kernels: int) -> None:
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    with nnx.use_eager_sharding(False):
        mlp = nnx.eval_shape(lambda: GatedMlp(HIDDEN, WIDTH, jnp.dtype(jnp.bfloat16), Placement()))
    graph, leaves = nnx.split(mlp)

    def call(leaves: nnx.State, x_TD: jax.Array, row_T: jax.Array) -> jax.Array:
        table = row_T[:, None]
        of_chunks = Chunks(table, row_T, row_T, row_T) if chunks else None
        paged = Paged(device, "auto", row_T > 0, row_T, row_T, table, row_T, of_chunks)
        return nnx.merge(graph, leaves)(x_TD, paged)

    x = jax.ShapeDtypeStruct((rows, HIDDEN), jnp.bfloat16)
    text = jax.jit(call).trace(leaves, x, row).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
