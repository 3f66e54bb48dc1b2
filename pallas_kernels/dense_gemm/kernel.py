"""The Hopper kernel of dense_gemm in Pallas Mosaic GPU: a stream of weights in equal shares for persistent CTAs.

Weights lie on wgmma's M axis, tokens on N: Y^T = W X^T. A CTA takes an equal range of the steps of all tiles of columns
(shares.py). One warpgroup copies, the others compute, each its own columns of a tile. Parts of a tile leave fp32 sums;
the warpgroup that is done last with its columns of the tile adds them in the order of parts, so that a result does not
depend on who comes when. NOTES.md has the design and figures.
Dimension keys beyond the contract's: R rows, S stages, B columns of a tile, L columns of a warpgroup, U partial
results, E computing warpgroups.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_gemm.shares import Shares
from pallas_kernels.grid_sync import last_to_arrive
from pallas_kernels.uniform import uniform

WIDTH = 64  # columns of a warpgroup: wgmma's M
STEP = 64  # of the inner dimension, at least: 128 bytes, the widest swizzle
ALIGN = 8  # rows of a swizzled tile of shared memory
_SWIZZLED = (plgpu.TilingTransform((ALIGN, STEP)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device and a product."""

    sides: int = 2  # computing warpgroups, of 64 columns each
    step: int = 128  # of the inner dimension; a multiple of 64
    stages: int = 4  # steps in flight
    ctas: int = 132


class _Segment(NamedTuple):
    """A CTA's steps of one tile."""

    tile: jax.Array
    steps: jax.Array
    part: jax.Array  # its number among those of its tile
    parts: jax.Array  # of the tile


def multiply(
    x_RK: jax.Array,
    w_NK: jax.Array,
    words_W: jax.Array,
    out: jax.Array | jax.ShapeDtypeStruct,
    *,
    shares: Shares,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[R, N] in out's dtype. out: an array is written in place.

    words_W: int32 zeros, one for each computing warpgroup of each tile at least.
    """
    R = x_RK.shape[0]
    native, sides, stages, step = interpret is None, tuning.sides, tuning.stages, tuning.step
    sizes = {"shares": shares, "tuning": tuning, "native": native}
    arrays = {"words_W": words_W, "x_RK": x_RK, "w_NK": w_NK}
    given = isinstance(out, jax.Array)
    names = [*arrays, *(("out_RN", "part_UELR") if given else ("part_UELR", "out_RN"))]

    def dense_gemm(*refs: Any, **scratch: Any) -> None:
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == sides)(lambda: _copy(r))
        pl.when(warpgroup < sides)(lambda: _compute(r, warpgroup))

    outs = [jax.ShapeDtypeStruct((shares.tiles * shares.most_parts, sides, WIDTH, R), jnp.float32)]
    outs += [] if given else [jax.ShapeDtypeStruct(out.shape, out.dtype)]
    call = plgpu.kernel(
        dense_gemm,
        out_type=tuple(outs),
        scratch_types={
            "w_SBK": plgpu.SMEM((stages, WIDTH * sides, step), x_RK.dtype, transforms=_SWIZZLED),
            "x_SRK": plgpu.SMEM((stages, R, step), x_RK.dtype, transforms=_SWIZZLED),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=sides, num_barriers=stages),
        },
        grid=(shares.ctas,),
        grid_names=("cta",),
        num_threads=sides + 1,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )
    if given:
        out_ref = jax.new_ref(out)
        [part_UELR] = call(*arrays.values(), out_ref)
        out = jax.freeze(out_ref)
    else:
        part_UELR, out = call(*arrays.values())
    return out if native else _merge(out, part_UELR, sizes, interpret=interpret)


def _segment(r: SimpleNamespace, begin: jax.Array, end: jax.Array) -> _Segment:
    """The first tile's part of the steps from `begin` on."""
    shares: Shares = r.shares
    tile = lax.div(begin, jnp.int32(shares.steps))
    steps = jnp.minimum((tile + 1) * shares.steps - begin, end - begin)
    part = lax.axis_index("cta") - shares.owner(tile * shares.steps)
    return _Segment(tile, steps, part, shares.parts(tile))


def _range(r: SimpleNamespace) -> tuple[jax.Array, jax.Array]:
    """First step of the CTA's share, and the one after its last; counted over all tiles."""
    cta = lax.axis_index("cta")
    return r.shares.begin(cta), r.shares.begin(cta + 1)


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: weights and rows of all steps, `stages` ahead."""
    begin, end = _range(r)
    stages = r.tuning.stages
    pl.loop(begin, end)(lambda step: _fetch(r, step, step - begin))
    if not r.native:  # which asks that every completion of a barrier be waited for; a GPU does not

        @pl.loop(jnp.maximum(end - begin - stages, 0), end - begin)
        def _(index: jax.Array) -> None:
            plgpu.barrier_wait(r.free.at[lax.rem(index, jnp.int32(stages))])


def _fetch(r: SimpleNamespace, number: jax.Array, done: jax.Array) -> None:
    """The step of that number, over all tiles; done: those of this CTA before it."""
    stages, step = r.tuning.stages, r.tuning.step
    stage = lax.rem(done, jnp.int32(stages))
    tile = lax.div(number, jnp.int32(r.shares.steps))
    inner = pl.ds((number - tile * r.shares.steps) * step, step)
    columns = pl.ds(tile * (WIDTH * r.tuning.sides), WIDTH * r.tuning.sides)
    pl.when(done >= stages)(lambda: plgpu.barrier_wait(r.free.at[stage]))
    plgpu.copy_gmem_to_smem(r.w_NK.at[columns, inner], r.w_SBK.at[stage], r.full.at[stage])
    plgpu.copy_gmem_to_smem(r.x_RK.at[:, inner], r.x_SRK.at[stage], r.full.at[stage])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its columns of each tile that the CTA has a part of."""
    start, end = _range(r)
    # Else the compiler takes what the loop carries to be divergent, and waits for each product before the next.
    same = uniform if r.native else lambda value: value

    def one(begin: jax.Array) -> jax.Array:
        segment = _segment(r, begin, end)
        acc = plgpu.ACC((WIDTH, r.x_RK.shape[0]), jnp.float32)
        value_LR = pl.run_scoped(lambda acc: _product(r, side, segment, begin - start, acc), acc)
        pl.when(segment.parts == 1)(lambda: _finish(r, side, segment.tile, value_LR))
        pl.when(segment.parts > 1)(lambda: _leave(r, side, segment, value_LR))
        return same(begin + segment.steps)

    lax.while_loop(lambda begin: begin < end, one, same(start))


def _product(r: SimpleNamespace, side: jax.Array, segment: _Segment, done: jax.Array, acc: Any) -> jax.Array:
    """fp32 [L, R]. The tensor cores wait for copies most of the time, so nothing is overlapped here."""
    mine = pl.ds(side * WIDTH, WIDTH)

    @pl.loop(0, segment.steps)
    def _(index: jax.Array) -> None:
        stage = lax.rem(done + index, jnp.int32(r.tuning.stages))
        plgpu.barrier_wait(r.full.at[stage])
        plgpu.wgmma(acc, r.w_SBK.at[stage, mine], r.x_SRK.at[stage].T)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(r.free.at[stage])

    return acc[...]


def _leave(r: SimpleNamespace, side: jax.Array, segment: _Segment, value_LR: jax.Array) -> None:
    """Stores the sums of a part; the last one of its tile adds them all. (In the interpreter another kernel does.)"""
    r.part_UELR.at[segment.tile * r.shares.most_parts + segment.part, side][...] = value_LR
    if r.native:
        word = r.words_W.at[segment.tile * r.tuning.sides + side]

        @pl.when(last_to_arrive(word, segment.parts))
        def _() -> None:
            _finish(r, side, segment.tile, _sum(r, side, segment.tile, segment.parts))


def _sum(r: SimpleNamespace, side: jax.Array, tile: jax.Array, parts: jax.Array) -> jax.Array:
    """fp32 [L, R]: all parts of a tile, in their order; they are few."""

    def part(number: jax.Array | int) -> jax.Array:
        place = r.part_UELR.at[tile * r.shares.most_parts + number, side]
        return plgpu.load(place, layout=_TILE, optimized=False)

    return lax.fori_loop(1, parts, lambda number, total: total + part(number), part(0))


def _finish(r: SimpleNamespace, side: jax.Array, tile: jax.Array, value_LR: jax.Array) -> None:
    """Rounds once; stores from registers, as results are few."""
    out_LR = r.out_RN.at[:, pl.ds((tile * r.tuning.sides + side) * WIDTH, WIDTH)].T
    out_LR[...] = plgpu.layout_cast(value_LR.astype(r.out_RN.dtype), _TURNED)


def _merge(out_RN: jax.Array, part_UELR: jax.Array, sizes: dict[str, Any], *, interpret: Any) -> jax.Array:
    """The tiles that are cut, written into `out` in place: for the interpreter, which cannot run how CTAs meet."""
    shares, tuning = sizes["shares"], sizes["tuning"]

    def dense_gemm_merge(*refs: Any) -> None:
        r = SimpleNamespace(**dict(zip(("part_UELR", "out_RN"), refs, strict=True)), **sizes)
        tile, side = lax.axis_index("tile"), lax.axis_index("side")
        parts = shares.parts(tile)
        pl.when(parts > 1)(lambda: _finish(r, side, tile, _sum(r, side, tile, parts)))

    grid = {"tile": shares.tiles, "side": tuning.sides}
    call = plgpu.kernel(dense_gemm_merge, grid=tuple(grid.values()), grid_names=tuple(grid), interpret=interpret)
    out_ref = jax.new_ref(out_RN)
    call(part_UELR, out_ref)
    return jax.freeze(out_ref)
