"""sampling's first kernel: takes rows, gives the second one the maximum and the mass of every 128 neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.common import CHUNK, LEAST, LEAST_CHUNKS, PARAMS, Tuning
from pallas_kernels.sampling.lists import LANES

# A warp holds a chunk, four neighbours a lane: loads are of whole lines, and sums stay within a warp.
_CHUNK_A_WARP = plgpu.Layout.TILED(plgpu.Tiling(((4, CHUNK), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def chunk_stats(
    x_BCL: jax.Array, scale_B: jax.Array | None, *, tuning: Tuning, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Maxima and masses, fp32 [B, C padded to a multiple of 128]; what lies past C is not written.

    x_BCL: C chunks a row, 64 at least. scale_B: None for probabilities, whose mass is their sum; for logits log2(e) /
    temperature, and the mass is relative to the chunk's own maximum.
    """
    rows, chunks, _ = x_BCL.shape
    scaled = scale_B is not None

    def sampling_chunks(*refs: Any) -> None:
        x_ref, *scale_ref = refs[: 1 + scaled]
        max_ref, mass_ref = refs[1 + scaled :]
        row, block = lax.axis_index("row"), lax.axis_index("block")
        for i in range(tuning.tiles):
            # The last tile overlaps the one before: it writes the same numbers again.
            start = jnp.minimum((block * tuning.tiles + i) * LEAST_CHUNKS, chunks - LEAST_CHUNKS)
            here = pl.ds(start, LEAST_CHUNKS)
            tile = plgpu.load(x_ref.at[row, here], layout=_CHUNK_A_WARP, optimized=False)
            top = tile.max(axis=1)
            if scaled:
                finite = jnp.maximum(top, LEAST)
                finite = plgpu.layout_cast(lax.broadcast_in_dim(finite, tile.shape, [0]), _CHUNK_A_WARP)
                tile = jnp.exp2((tile - finite) * scale_ref[0][row])
            max_ref.at[row, here][...] = top
            mass_ref.at[row, here][...] = tile.sum(axis=1)

    out = jax.ShapeDtypeStruct((rows, -(-chunks // LANES) * LANES), jnp.float32)
    return plgpu.kernel(
        sampling_chunks,
        out_type=(out, out),
        grid=(-(-chunks // (tuning.tiles * LEAST_CHUNKS)), rows),
        grid_names=("block", "row"),
        interpret=interpret,
        compiler_params=PARAMS,
    )(x_BCL, *((scale_B,) if scaled else ()))
