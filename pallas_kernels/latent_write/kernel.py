"""The kernel of latent_write in Pallas Mosaic GPU: some CTAs write latents, others turn queries.

All rows of a CTA are read before its first is written, so that one latency covers them all. NOTES.md has figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rotary import Rotary, Rows

_THREADS, _WARPS = 128, 4
_HEADS = 16  # whose queries a CTA turns


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    tokens: int = 1  # a CTA


@dataclass(frozen=True, slots=True)
class Write:
    """What is done to the rows. first: of the columns of a row that hold the latent, which its key follows."""

    rotary: Rotary
    first: int
    rank: int
    eps: float


def write(
    latent_PKL: jax.Array,
    down_TW: jax.Array,
    scale_R: jax.Array,
    q_THE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    how: Write,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The turned part of the queries, [T, H, dims], and the pool, which is written in place."""
    T, H = q_THE.shape[:2]
    tokens = min(tuning.tokens, T)
    heads = _HEADS if H % _HEADS == 0 else H

    def latent_write(*refs: Any) -> None:
        names = ("down", "scale", "q", "cos", "sin", "page", "offset", "pool", "out")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), interpreted=interpret is not None, tokens=tokens)
        # The last block starts early enough to be whole: some tokens are then done twice, with the same result.
        first = jnp.minimum(lax.axis_index("block") * tokens, T - tokens)
        piece = lax.axis_index("piece")
        pl.when(piece == 0)(lambda: _latents(r, first, how))
        pl.when(piece > 0)(lambda: _queries(r, first, pl.ds((piece - 1) * heads, heads), how))

    pool_ref = jax.new_ref(latent_PKL)
    call = plgpu.kernel(
        latent_write,
        out_type=jax.ShapeDtypeStruct((T, H, how.rotary.dims), q_THE.dtype),
        grid=(-(-T // tokens), 1 + H // heads),
        grid_names=("block", "piece"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    turned_THC = call(down_TW, scale_R, q_THE, cos_TC, sin_TC, page_T, offset_T, pool_ref)
    return turned_THC, jax.freeze(pool_ref)


def _row_layout(columns: int) -> Any:
    """Rows one after the other, each over all threads of the warpgroup."""
    width = columns // _THREADS
    tiling = Tiling(((1, columns), (1, columns // _WARPS), (1, width)))
    found = TiledLayout(tiling, (-5,), (-3,), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


def _latents(r: SimpleNamespace, first: jax.Array, how: Write) -> None:
    """Norms latents, turns keys, and writes both to their pages."""
    layout, shape = _row_layout(how.rank), (r.tokens, how.rank)
    pages = r.pool.shape[0]
    key_rows = Rows.of(1, how.rotary, how.rotary.dims, interpreted=r.interpreted)
    tokens = [first + index for index in range(r.tokens)]
    places = [(r.page[token], r.offset[token]) for token in tokens]
    latent = plgpu.load(r.down.at[pl.ds(first, r.tokens), pl.ds(how.first, how.rank)], layout=layout, optimized=False)
    scale = plgpu.load(r.scale, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
    key_columns = pl.ds(how.first + how.rank, how.rotary.dims)
    keys = [
        key_rows.turned(
            key_rows.load(r.down.at[pl.ds(token, 1), key_columns]),
            key_rows.angles(r.cos.at[token]),
            key_rows.angles(r.sin.at[token]),
        )
        for token in tokens
    ]
    wide = latent.astype(jnp.float32)
    factor_T = lax.rsqrt((wide * wide).sum(axis=1) * (1 / how.rank) + how.eps)
    rounded = (wide * plgpu.layout_cast(lax.broadcast_in_dim(factor_T, shape, [0]), layout)).astype(latent.dtype)
    # Two bf16 factors have an exact fp32 product: it is rounded once, as in bf16.
    scaled = rounded.astype(jnp.float32) * plgpu.layout_cast(lax.broadcast_in_dim(scale, shape, [1]), layout)
    row = scaled.astype(latent.dtype)
    for index, (page, offset) in enumerate(places):

        @pl.when((page >= 0) & (page < pages))
        def _(index: int = index, page: jax.Array = page, offset: jax.Array = offset) -> None:
            r.pool.at[pl.ds(page, 1), offset, pl.ds(0, how.rank)][...] = row[index : index + 1]
            key_rows.store(r.pool.at[pl.ds(page, 1), offset, pl.ds(how.rank, how.rotary.dims)], keys[index])


def _queries(r: SimpleNamespace, first: jax.Array, heads: Any, how: Write) -> None:
    """Turns the last dimensions of some heads' queries."""
    dims, width = how.rotary.dims, r.q.shape[2]
    rows = Rows.of(heads.size, how.rotary, dims, interpreted=r.interpreted)
    tokens = [first + index for index in range(r.tokens)]
    values = [rows.load(r.q.at[token, heads, pl.ds(width - dims, dims)]) for token in tokens]
    angles = [(rows.angles(r.cos.at[token]), rows.angles(r.sin.at[token])) for token in tokens]
    for token, value, (cos, sin) in zip(tokens, values, angles, strict=True):
        rows.store(r.out.at[token, heads], rows.turned(value, cos, sin))
