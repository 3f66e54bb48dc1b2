"""Rotary embedding and norm of heads, as arrays and as registers: shared by the kernels that write caches.

A register layout spreads the rows of a tile (heads of one token) over warps and lanes, and a row's columns over lanes
of one warp, so that a sum along a row takes shuffles only. A row is held in pieces: the two halves of its rotating
dimensions, whose values with the same index turn together, and the rest. Dimension keys: R rows, C columns of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, TiledLayout, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

_WARPS, _LANES = 4, 32
_VECTOR = 8  # bf16 values of 16 bytes, the widest access of a thread


@dataclass(frozen=True, slots=True)
class Rotary:
    """The first `dims` dimensions of a head turn; interleaved: in pairs (2i, 2i + 1), not (i, i + dims / 2)."""

    dims: int
    interleaved: bool = False

    def check(self, op: str, head_dim: int) -> None:
        """ValueError where a head of this width cannot turn so."""
        if self.dims % 2 or not 0 < self.dims <= head_dim:
            raise ValueError(f"{op}: rotary dims is {self.dims}, must be even and from 2 to the head's {head_dim}.")


def rotate(rotary: Rotary, x: jax.Array, cos_TC: jax.Array, sin_TC: jax.Array) -> jax.Array:
    """x [T, ..., E] turned by the angles of its row (fp32, C = dims / 2); computed in fp32, returned in x's dtype."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (-1,)
    cos, sin = cos_TC.reshape(shape), sin_TC.reshape(shape)
    turning, rest = x[..., : rotary.dims].astype(jnp.float32), x[..., rotary.dims :]
    if rotary.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(turning.shape)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), rest), axis=-1)


def normed(x: jax.Array, scale_E: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, statistics in fp32; the product in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale_E


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a row's columns: every `stride`-th from `first` on, `columns` of them."""

    first: int
    columns: int
    stride: int = 1

    def of(self, ref: Any, interpreted: bool) -> Any:
        """This part of a ref [..., E]."""
        before = (slice(None),) * (len(ref.shape) - 1)
        if self.stride == 1 or interpreted:  # the interpreter takes strides and no new shape, the GPU the reverse
            return ref.at[(*before, pl.ds(self.first, self.columns, self.stride))]
        pairs = ref.reshape(*ref.shape[:-1], ref.shape[-1] // 2, 2)
        return pairs.at[(*before, pl.ds(0, self.columns), self.first)]


def pieces(rotary: Rotary, head_dim: int) -> tuple[Piece, ...]:
    """The two that turn together, and the rest if there is one."""
    half = rotary.dims // 2
    turning = (Piece(0, half, 2), Piece(1, half, 2)) if rotary.interleaved else (Piece(0, half), Piece(half, half))
    rest = (Piece(rotary.dims, head_dim - rotary.dims),) if rotary.dims < head_dim else ()
    return turning + rest


def tile_rows(rows: int) -> int:
    """Rows that a tile spreads over threads: a power of 2 that divides them, 16 at most."""
    return min(rows & -rows, 16)


def layouts(rows: int, parts: tuple[Piece, ...]) -> tuple[plgpu.Layout, ...]:
    """Register layouts of tiles [rows, piece.columns], all with the same rows in the same lanes.

    rows: any number, but the more powers of 2 are in it, the more threads share a tile.
    """
    return tuple(_layout(tile_rows(rows), _lanes(rows, parts), part) for part in parts)


def values_each(rows: int, parts: tuple[Piece, ...]) -> int:
    """Values that a thread holds of a tile [rows, head dimension]."""
    return rows // tile_rows(rows) * sum(part.columns for part in parts) // _lanes(rows, parts)


def _lanes(rows: int, parts: tuple[Piece, ...]) -> int:
    """That a row takes, in every piece the same."""
    return min(_LANES, _WARPS * _LANES // tile_rows(rows), *(part.columns & -part.columns for part in parts))


def _layout(rows: int, lanes: int, part: Piece) -> Any:
    """`rows` rows over lanes first, then warps; where there are fewer than places for them, several hold the same."""
    in_warp = min(rows, _LANES // lanes)
    warps = min(_WARPS, rows // in_warp)
    width = 1
    while part.stride == 1 and width < _VECTOR and part.columns % (2 * width * lanes) == 0:
        width *= 2
    tiling = Tiling(((warps * in_warp, part.columns), (in_warp, part.columns), (1, lanes * width), (1, width)))
    # Tiled: ..., warps, 1, in_warp, blocks of columns, 1, lanes, 1, width.
    over_warps = (-8, Replicated(_WARPS // warps)) if warps < _WARPS else (-8,)
    over_lanes = (-6, Replicated(_LANES // lanes // in_warp), -3) if in_warp * lanes < _LANES else (-6, -3)
    found = TiledLayout(tiling, over_warps, over_lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


@dataclass(frozen=True, slots=True)
class Rows:
    """How tiles [rows, head_dim] are read, normed, turned and written, piece by piece."""

    rows: int
    parts: tuple[Piece, ...]
    layouts: tuple[Any, ...]
    interpreted: bool

    @classmethod
    def of(cls, rows: int, rotary: Rotary, head_dim: int, *, interpreted: bool) -> Rows:
        """For tiles of so many rows."""
        parts = pieces(rotary, head_dim)
        return cls(rows, parts, layouts(rows, parts), interpreted)

    def load(self, ref: Any) -> list[jax.Array]:
        """The pieces of a ref [R, E]."""
        return [
            plgpu.load(part.of(ref, self.interpreted), layout=layout, optimized=False)
            for part, layout in zip(self.parts, self.layouts, strict=True)
        ]

    def store(self, ref: Any, values: list[jax.Array]) -> None:
        """Writes the pieces of a ref [R, E]."""
        for part, value in zip(self.parts, values, strict=True):
            part.of(ref, self.interpreted)[...] = value.astype(ref.dtype)

    def vector(self, ref: Any, index: int) -> jax.Array:
        """Piece `index` of a ref [E], one value a column, for all rows of a tile."""
        layout = self.layouts[index]
        return self.spread(
            plgpu.load(self.parts[index].of(ref, self.interpreted), layout=layout.reduce(0), optimized=False), index
        )

    def angles(self, ref: Any) -> jax.Array:
        """Of a ref [C]: the cosines or sines of one token, for all rows of a tile."""
        return self.spread(plgpu.load(ref, layout=self.layouts[0].reduce(0), optimized=False), 0)

    def spread(self, value_C: jax.Array, index: int) -> jax.Array:
        """[C] -> [R, C]."""
        shape = (self.rows, self.parts[index].columns)
        return plgpu.layout_cast(lax.broadcast_in_dim(value_C, shape, [1]), self.layouts[index])

    def vectors(self, ref: Any) -> list[jax.Array]:
        """The pieces of a ref [E], one value a column, in fp32 for all rows of a tile."""
        return [self.vector(ref, index).astype(jnp.float32) for index in range(len(self.parts))]

    def normed(self, values: list[jax.Array], scales: list[jax.Array], eps: float) -> list[jax.Array]:
        """See the function; values bf16, returned bf16. scales: of `vectors`."""
        wide = [value.astype(jnp.float32) for value in values]
        total_R: Any = 0.0
        for value in wide:
            total_R = total_R + (value * value).sum(axis=1)
        columns = sum(part.columns for part in self.parts)
        factor_R = lax.rsqrt(total_R * (1 / columns) + eps)
        out = []
        for index, (value, short) in enumerate(zip(wide, values, strict=True)):
            factor = plgpu.layout_cast(lax.broadcast_in_dim(factor_R, value.shape, [0]), self.layouts[index])
            rounded = (value * factor).astype(short.dtype).astype(jnp.float32)
            # Two bf16 factors have an exact fp32 product: it is rounded once, as in bf16.
            out.append((rounded * scales[index]).astype(short.dtype))
        return out

    def turned(self, values: list[jax.Array], cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
        """See `rotate`; in fp32, returned in the values' dtype. cos, sin: of `angles`."""
        a, b = (value.astype(jnp.float32) for value in values[:2])
        dtype = values[0].dtype
        return [(a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype), *values[2:]]
