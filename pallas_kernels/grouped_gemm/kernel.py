"""The Hopper kernel of grouped_gemm in Pallas Mosaic GPU: persistent CTAs that share out the tiles of all experts.

Weights lie on wgmma's M axis, the rows of an expert on N, so that few rows cost few columns: Y^T = W X^T. Two
warpgroups compute, a third copies, tiles ahead of them. A tile is 2 blocks of 128 columns of one expert (gate and up,
or neighbours) by R rows that start at a multiple of 8, as a tiled copy must; what other experts own there is computed
and not stored. Few rows an expert: each warpgroup finds its CTA's share of the tiles by itself. Many: CTAs take tiles
from a queue. NOTES.md has the design and figures.
Dimension keys beyond the contract's: R rows of a tile, S stages, B columns of a block, L columns of a warpgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grid_sync, tile_queue
from pallas_kernels.grouped_gemm import walk as walks
from pallas_kernels.grouped_gemm.walk import ALIGN, WALK, Tile, Walk

BLOCK, HALF = 128, 64  # columns of a block, and of a warpgroup in it: wgmma's M
STEP = 64  # of the inner dimension, at least: 128 bytes, the widest swizzle
_SWIZZLE = plgpu.SwizzleTransform(128)
_SWIZZLED = (plgpu.TilingTransform((ALIGN, STEP)), _SWIZZLE)
_ROWS = plgpu.Layout.WGMMA.reduce(0)  # one value a row of the tile
_COPY = 2  # the warpgroup that copies
_WORDS = Tile._fields[:5]  # that a queue's tile is published with, after whether there is one


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device and a number of rows an expert."""

    rows: int = 128  # R, of a tile; a multiple of 8
    widths: tuple[int, ...] = ()  # rows of narrower products, for tiles that hold no more; multiples of 8 below R
    stages: int = 4  # steps in flight
    step: int = STEP  # of the inner dimension; a multiple of 64
    blocks: int = 2  # of a tile; gate and up are always 2
    stagger: int = 1  # steps by which the second warpgroup starts late: it multiplies while the first one stores
    store_rows: int = 128  # that leave through shared memory at once, at most
    swizzled_stores: bool = True  # without, threads that write neighbouring rows there meet in one bank
    matrix_stores: bool = False  # stmatrix transposes on its way to shared memory; without, shuffles do so before
    queue: bool = False  # CTAs take tiles when they are free, else equal shares; the copying warpgroup looks them up
    late: int = 4  # steps before the end of a tile's copies at which the next tile is taken
    ctas: int = 132  # one an SM
    compute_registers: int = 232
    copy_registers: int = 40


def grouped(
    x_AK: jax.Array,
    w_XPNK: jax.Array,
    size_X: jax.Array,
    weight_A: jax.Array | None,
    out_AN: jax.Array | None = None,
    *,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[A, N] in x's dtype, as the contract's functions give it; P 2: silu of the first product times the second.

    x_AK: sorted rows, a multiple of 8 and R at least. size_X: of a multiple of 8 experts, where the weights' last ones
    may be missing. weight_A: fp32, as many as rows of x. out_AN: is written in place.
    """
    A, K = x_AK.shape
    X, P, N, _ = w_XPNK.shape
    R, blocks, step = tuning.rows, tuning.blocks, tuning.step
    # A tile's words are kept for three more tiles: the copies must not be further ahead.
    stages = min(tuning.stages, K // step) if tuning.queue else tuning.stages
    columns = -(-N // (BLOCK if P == 2 else BLOCK * blocks))
    row_tiles = A // R + 2 * min(X, A)  # at most: a tile more than its rows need for each expert, and one for alignment
    sizes = {
        "columns": columns,
        "steps": K // step,
        "stages": stages,
        "ctas": tuning.ctas,
        "groups": size_X.shape[0] // WALK,
        "rounds": -(-row_tiles * columns // tuning.ctas),
        "uneven": P == 1 and -(-N // BLOCK) % blocks > 0,
        "tuning": tuning,
        "native": interpret is None,
    }
    arrays = {"size_X": size_X, "x_AK": x_AK, "w_XPNK": w_XPNK}
    if weight_A is not None:
        arrays["weight_A"] = weight_A
    if tuning.queue:
        arrays["next_2"] = grid_sync.zero_words(jnp.broadcast_to(size_X[:1], (2,)))

    def grouped_gemm(*refs: Any, **scratch: Any) -> None:
        r = SimpleNamespace(**dict(zip([*arrays, "out_AN"], refs, strict=True)), **scratch, **sizes)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < _COPY)(lambda: _compute(r, warpgroup))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        grouped_gemm,
        out_type=() if out_AN is not None else jax.ShapeDtypeStruct((A, N), x_AK.dtype),
        scratch_types={
            "w_SPBK": plgpu.SMEM((stages, blocks, BLOCK, step), x_AK.dtype, transforms=_SWIZZLED),
            "x_SRK": plgpu.SMEM((stages, R, step), x_AK.dtype, transforms=_SWIZZLED),
            "o_2RL": plgpu.SMEM(
                (2, min(R, tuning.store_rows), HALF),
                x_AK.dtype,
                transforms=(_SWIZZLE,) if tuning.swizzled_stores else (),
            ),
            "full": plgpu.Barrier(num_arrivals=blocks + 1, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "ahead": plgpu.Barrier(),
        }
        | (tile_queue.scratch() if tuning.queue else {}),
        grid=(tuning.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    if out_AN is None:
        return call(*arrays.values())
    out_ref = jax.new_ref(out_AN)
    call(*arrays.values(), out_ref)
    return jax.freeze(out_ref)


def _for_each_share(r: SimpleNamespace, visit: Callable[[Tile], None]) -> jax.Array:
    """visit(tile) for each tile of this CTA where CTAs have equal shares. Returns its number of steps.

    Neighbouring CTAs take neighbouring columns of the same rows, then the expert's next rows: what they share is in
    the L2. Each round shifts them by one, so that none has only tiles that are not whole.
    """
    cta, ctas = lax.axis_index("cta"), jnp.int32(r.ctas)

    def one(index: jax.Array, state: tuple[Walk, jax.Array]) -> tuple[Walk, jax.Array]:
        walk, done = state
        number = index * ctas + lax.rem(cta + index, ctas)
        row_tile, column = lax.div(number, jnp.int32(r.columns)), lax.rem(number, jnp.int32(r.columns))
        walk = walks.advance(r, walk, row_tile)
        here = walk.group < r.groups
        pl.when(here)(lambda: visit(walks.place(r, walk, row_tile - walk.tiles_before, column, done)))
        return walk, done + jnp.where(here, r.steps, 0)

    zero = jnp.int32(0)
    _, done = lax.fori_loop(0, r.rounds, one, (walks.begin(r), zero))
    return done


def _for_each_taken(r: SimpleNamespace, visit: Callable[[Tile, int | jax.Array, int | jax.Array], None]) -> jax.Array:
    """The copying warpgroup's loop over what its CTA takes from the queue: visit(tile, first step, end). Returns steps.

    It leaves each tile's words for the computing warpgroups before the first step of it, so that they wait for no walk.
    """
    late = min(r.tuning.late, r.steps)
    r.cta = lax.axis_index("cta")

    def look_up(walk: Walk, turn: jax.Array, number: jax.Array) -> tuple[Walk, Tile]:
        walk = walks.advance(r, walk, lax.div(number, jnp.int32(r.columns)))
        tile = walks.place(r, walk, *walks.wholes_first(r, walk, number), turn * r.steps)
        there = (walk.group < r.groups).astype(jnp.int32)
        tile_queue.publish(r, turn, (there, *tile[: len(_WORDS)]))
        return walk, tile

    def one(state: tuple[jax.Array, Walk, Tile]) -> tuple[jax.Array, Walk, Tile]:
        turn, walk, tile = state
        visit(tile, 0, r.steps - late)
        walk, after = look_up(walk, turn + 1, tile_queue.take(r, turn + 1))
        visit(tile, r.steps - late, r.steps)
        return turn + 1, walk, after

    zero = jnp.int32(0)
    state = (zero, *look_up(walks.begin(r), zero, r.cta))
    turn, *_ = lax.while_loop(lambda state: state[1].group < r.groups, one, state)
    tile_queue.close(r)
    return turn * r.steps


def _for_each_published(r: SimpleNamespace, visit: Callable[[Tile], None]) -> None:
    """A computing warpgroup's loop over what its CTA took."""

    def there(turn: jax.Array) -> jax.Array:
        tile_queue.await_item(r, turn)
        return tile_queue.word(r, turn, 0)

    def one(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turn, _ = state
        words = {name: tile_queue.word(r, turn, 1 + i) for i, name in enumerate(_WORDS)}
        visit(Tile(**words, whole=walks.is_whole(r, words["column"]), done=turn * r.steps))
        return turn + 1, there(turn + 1)

    zero = jnp.int32(0)
    lax.while_loop(lambda state: state[1] > 0, one, (zero, there(zero)))


def _column(r: SimpleNamespace, tile: Tile, block: int) -> jax.Array:
    """First column of a block in its product; the last block of a product is moved up to end with it."""
    P, N = r.w_XPNK.shape[1:3]
    number = tile.column if P == 2 else tile.column * r.tuning.blocks + block
    return jnp.minimum(number * (BLOCK // ALIGN), (N - BLOCK) // ALIGN) * ALIGN


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: weights and rows, `stages` steps ahead."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    P, stages, step = r.w_XPNK.shape[1], r.stages, r.tuning.step

    def visit(tile: Tile, first: int | jax.Array = 0, end: int | jax.Array = r.steps) -> None:
        columns = [_column(r, tile, block) for block in range(r.tuning.blocks)]

        @pl.loop(first, end)
        def _(index: jax.Array) -> None:
            stage = lax.rem(tile.done + index, jnp.int32(stages))
            inner = pl.ds(index * step, step)
            pl.when(tile.done + index >= stages)(lambda: plgpu.barrier_wait(r.free.at[stage]))
            for block, column in enumerate(columns):
                source = r.w_XPNK.at[tile.expert, block if P == 2 else 0, pl.ds(column, BLOCK), inner]

                def fetch(source: Any = source, block: int = block) -> None:
                    plgpu.copy_gmem_to_smem(source, r.w_SPBK.at[stage, block], r.full.at[stage])

                if block and r.uneven:
                    pl.when(tile.whole)(fetch)
                    pl.when(jnp.logical_not(tile.whole))(lambda: plgpu.barrier_arrive(r.full.at[stage]))
                else:
                    fetch()
            rows = pl.ds(pl.multiple_of(tile.first_row, ALIGN), r.tuning.rows)
            plgpu.copy_gmem_to_smem(r.x_AK.at[rows, inner], r.x_SRK.at[stage], r.full.at[stage])

    done = _for_each_taken(r, visit) if r.tuning.queue else _for_each_share(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(done - stages, 0), done)
    def _(index: jax.Array) -> None:
        plgpu.barrier_wait(r.free.at[lax.rem(index, jnp.int32(stages))])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 columns of each block of each tile."""
    if r.native:
        plgpu.set_max_registers(r.tuning.compute_registers, action="increase")
    acc = plgpu.ACC((HALF, r.tuning.rows), jnp.float32)

    def visit(tile: Tile) -> None:
        if r.tuning.stagger:
            pl.when((side == 1) & (tile.done == 0))(lambda: plgpu.barrier_wait(r.ahead))
        pieces = pl.run_scoped(lambda *accs: _products(r, side, tile, accs), *[acc] * r.tuning.blocks)
        if r.w_XPNK.shape[1] == 2:
            gate, up = pieces
            pieces = [gate / (1.0 + jnp.exp(-gate)) * up]
        # Few rows: the weights are read once. Else for each block when it is stored: registers for all do not suffice.
        by_block = r.tuning.queue
        if not by_block:
            pieces = [_weighted(r, tile, piece) for piece in pieces]
        for block, piece in enumerate(pieces):

            def store(block: int = block, piece: jax.Array = piece) -> None:
                piece = _weighted(r, tile, piece) if by_block else piece
                _store(r, side, tile, _column(r, tile, block), piece.astype(r.o_2RL.dtype))

            pl.when(tile.whole)(store) if block and r.uneven else store()

    (_for_each_published if r.tuning.queue else _for_each_share)(r, visit)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _weighted(r: SimpleNamespace, tile: Tile, piece_LR: jax.Array) -> jax.Array:
    """Times the weights of the tile's rows, where there are any."""
    if not hasattr(r, "weight_A"):
        return piece_LR
    weight_R = plgpu.load(r.weight_A.at[pl.ds(tile.first_row, r.tuning.rows)], layout=_ROWS, optimized=False)
    return piece_LR * lax.broadcast_in_dim(weight_R, piece_LR.shape, [1])


def _products(r: SimpleNamespace, side: jax.Array, tile: Tile, accs: tuple[Any, ...]) -> list[jax.Array]:
    """One fp32 [64, R] a block, by the narrowest products that hold the tile's rows."""

    def narrowest(widths: Sequence[int]) -> None:
        if len(widths) > 1:
            lower, upper = widths[: len(widths) // 2], widths[len(widths) // 2 :]
            pl.when(tile.end_live <= lower[-1])(lambda: narrowest(lower))
            pl.when(tile.end_live > lower[-1])(lambda: narrowest(upper))
            return

        def multiply(count: int = len(accs)) -> None:
            _steps(r, side, tile, [acc.at[:, pl.ds(0, widths[0])] for acc in accs[:count]])

        if r.uneven:
            pl.when(jnp.logical_not(tile.whole))(lambda: multiply(1))
        pl.when(tile.whole)(multiply) if r.uneven else multiply()

    narrowest((*r.tuning.widths, r.tuning.rows))
    return [acc[...] for acc in accs]


def _steps(r: SimpleNamespace, side: jax.Array, tile: Tile, accs: list[Any]) -> None:
    """The products of all steps; each gives its stage back while the next one runs."""
    stages = r.stages
    width = accs[0].shape[1]
    mine = pl.ds(side * HALF, HALF)
    ahead = min(r.tuning.stagger, r.steps) - 1

    @pl.loop(0, r.steps)
    def _(index: jax.Array) -> None:
        stage = lax.rem(tile.done + index, jnp.int32(stages))
        last = lax.rem(tile.done + index + (stages - 1), jnp.int32(stages))
        plgpu.barrier_wait(r.full.at[stage])
        for block, acc in enumerate(accs):
            plgpu.wgmma(acc, r.w_SPBK.at[stage, block, mine], r.x_SRK.at[stage, pl.ds(0, width)].T)
        if r.tuning.stagger:
            pl.when((side == 0) & (tile.done + index == ahead))(lambda: plgpu.barrier_arrive(r.ahead))
        plgpu.wgmma_wait(len(accs))
        pl.when(index > 0)(lambda: plgpu.barrier_arrive(r.free.at[last]))

    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(r.free.at[lax.rem(tile.done + (r.steps - 1), jnp.int32(stages))])


def _store(r: SimpleNamespace, side: jax.Array, tile: Tile, column: jax.Array, piece_LR: jax.Array) -> None:
    """Transposes a warpgroup's part through shared memory and writes the tile's live rows, a power of two a copy."""
    stage_RL = r.o_2RL.at[side]
    columns = pl.ds(column + side * HALF, HALF)
    most = stage_RL.shape[0]
    for start in range(0, r.tuning.rows, most):
        part_LR = piece_LR[:, start : start + most]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        target_RL = stage_RL.at[pl.ds(0, part_LR.shape[1])]
        if not r.tuning.matrix_stores:
            part_LR = plgpu.layout_cast(part_LR, plgpu.Layout.WGMMA_TRANSPOSED)
        target_RL.T[...] = part_LR
        plgpu.commit_smem()
        place = jnp.clip(tile.first_live - start, 0, part_LR.shape[1])
        count = jnp.clip(tile.end_live - start, 0, part_LR.shape[1]) - place
        width = 1 << (part_LR.shape[1].bit_length() - 1)
        while width:

            @pl.when((count & width) != 0)
            def _(place: jax.Array = place, width: int = width, start: int = start) -> None:
                rows = pl.ds(tile.first_row + start + place, width)
                plgpu.copy_smem_to_gmem(stage_RL.at[pl.ds(place, width)], r.out_AN.at[rows, columns])

            place += count & width
            width //= 2
