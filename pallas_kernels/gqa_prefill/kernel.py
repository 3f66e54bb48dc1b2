"""The Hopper kernel of gqa_prefill in Pallas Mosaic GPU: one CTA a query tile and query head.

Two warpgroups compute 64 query rows each over the same key blocks; a third copies pages into shared memory, one copy
a page. They take turns: one's softmax runs under the other's products. Rows are packed without alignment, which a tiled
copy cannot address: queries come through registers, outputs leave row by row where a tile is not full. NOTES.md has the
design and figures.
Dimension keys beyond the contract's: W tile slots, S stages, L tokens of a key block, J query rows of a warpgroup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.gqa_prefill.tiles import Gaps, Tiles

PAGE_TOKENS = 64
ROWS = 64  # query rows of a warpgroup: wgmma's M
TILE_TOKENS = 2 * ROWS
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a query row
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_COPY = 2  # the warpgroup that copies


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    pages: int = 2  # of a key block
    stages: int = 2  # key blocks in flight
    turns: bool = True  # one warpgroup's softmax runs under the other's products
    compute_registers: int = 240
    copy_registers: int = 24


def prefill(
    q_THE: jax.Array,
    k_PKE: jax.Array,
    v_PKE: jax.Array,
    table_RM: jax.Array,
    tiles: Tiles,
    gaps: Gaps,
    *,
    kv_heads: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, E] in q's dtype, zeros for rows of no chunk. k_PKE, v_PKE: page * N + head is the first axis."""
    _, heads, head_dim = q_THE.shape
    tile_ctas = tiles.row_W.shape[0] * heads
    block = tuning.pages * PAGE_TOKENS
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "block": block,
        "scale": scale * math.log2(math.e),
        "tuning": tuning,
        "native": interpret is None,
    }

    def gqa_prefill_tile(*refs: Any, **scratch: Any) -> None:
        names = (
            *Tiles._fields,
            *Gaps._fields,
            "table_RM",
            "q_THE",
            "k_PKE",
            "v_PKE",
            "out_THE",
        )
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        index = lax.axis_index("tile")
        is_tile = index < tile_ctas
        r.slot = lax.div(jnp.minimum(index, tile_ctas - 1), jnp.int32(heads))
        r.head = lax.rem(index, jnp.int32(heads))
        r.blocks = jnp.where(is_tile, lax.div(r.keys_W[r.slot] + (block - 1), jnp.int32(block)), 0)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(jnp.logical_not(is_tile) & (warpgroup == 0))(lambda: _zero_gaps(r, lax.axis_index("tile") - tile_ctas))
        pl.when((r.blocks > 0) & (warpgroup < _COPY))(lambda: _compute(r, warpgroup))
        pl.when((r.blocks > 0) & (warpgroup == _COPY))(lambda: _copy(r))

    scratch_types = {
        "q_2JE": plgpu.SMEM((2, ROWS, head_dim), q_THE.dtype, transforms=_SWIZZLED),
        "k_SLE": plgpu.SMEM((tuning.stages, block, head_dim), q_THE.dtype, transforms=_SWIZZLED),
        "v_SLE": plgpu.SMEM((tuning.stages, block, head_dim), q_THE.dtype, transforms=_SWIZZLED),
        "o_2JE": plgpu.SMEM((2, ROWS, head_dim), q_THE.dtype),
        "k_full": plgpu.Barrier(num_arrivals=tuning.pages, num_barriers=tuning.stages),
        "v_full": plgpu.Barrier(num_arrivals=tuning.pages, num_barriers=tuning.stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.stages),
    }
    if interpret is not None:
        scratch_types["p_2JL"] = plgpu.SMEM((2, ROWS, block), q_THE.dtype, transforms=_SWIZZLED)
    call = plgpu.kernel(
        gqa_prefill_tile,
        out_type=jax.ShapeDtypeStruct(q_THE.shape, q_THE.dtype),
        scratch_types=scratch_types,
        grid=(tile_ctas + gaps.rows_Z.shape[0],),
        grid_names=("tile",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return call(*tiles, *gaps, table_RM, q_THE, k_PKE, v_PKE)


def _zero_gaps(r: SimpleNamespace, block: jax.Array) -> None:
    """Zeroes the rows of no chunk of a block of TILE_TOKENS packed rows. Most blocks have none."""

    @pl.when(r.rows_Z[block] > 0)
    def _() -> None:
        zeros = jnp.zeros((ROWS, r.head_dim), r.o_2JE.dtype)
        r.o_2JE.at[0][...] = plgpu.layout_cast(zeros, _TILE)
        plgpu.commit_smem()
        first = block * TILE_TOKENS
        width = max(n for n in range(1, min(r.heads, ROWS) + 1) if r.heads % n == 0)

        @pl.loop(first, jnp.minimum(first + TILE_TOKENS, r.out_THE.shape[0]))
        def _(row: jax.Array) -> None:
            @pl.when(r.owned_T[row] == 0)
            def _() -> None:
                for head in range(0, r.heads, width):
                    plgpu.copy_smem_to_gmem(
                        r.o_2JE.at[0, pl.ds(0, width)],
                        r.out_THE.at[row, pl.ds(head, width)],
                    )

        plgpu.wait_smem_to_gmem(0)


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: pages of keys and values, `stages` key blocks ahead."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    stages, pages = r.tuning.stages, r.tuning.pages
    chunk = r.chunk_W[r.slot]
    kv_head = lax.div(r.head, jnp.int32(r.heads // r.kv_heads))
    last_page = r.k_PKE.shape[0] // r.kv_heads - 1

    def places(block: jax.Array) -> tuple[jax.Array, ...]:
        # The last block may reach past the request's pages, where entries may be anything.
        indices = [jnp.minimum(block * pages + i, r.table_RM.shape[1] - 1) for i in range(pages)]
        return tuple(jnp.clip(r.table_RM[chunk, i], 0, last_page) * r.kv_heads + kv_head for i in indices)

    def fetch(block: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        following = places(block + 1)  # read before the waits, which then hide its latency
        stage = lax.rem(block, jnp.int32(stages))
        for pool, buffer, full, free in (
            (r.k_PKE, r.k_SLE, r.k_full, r.k_free),
            (r.v_PKE, r.v_SLE, r.v_full, r.v_free),
        ):
            pl.when(block >= stages)(lambda free=free: plgpu.barrier_wait(free.at[stage]))
            for i, place in enumerate(now):
                rows = pl.ds(i * PAGE_TOKENS, PAGE_TOKENS)
                plgpu.copy_gmem_to_smem(pool.at[place], buffer.at[stage, rows], full.at[stage])
        return following

    lax.fori_loop(0, r.blocks, fetch, places(jnp.int32(0)))

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(r.blocks - stages, 0), r.blocks)
    def _(block: jax.Array) -> None:
        stage = lax.rem(block, jnp.int32(stages))
        plgpu.barrier_wait(r.k_free.at[stage])
        plgpu.barrier_wait(r.v_free.at[stage])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of the tile over all key blocks, then their way out."""
    if r.native:
        plgpu.set_max_registers(r.tuning.compute_registers, action="increase")
    first = side * ROWS
    row = r.row_W[r.slot] + first
    position = r.position_W[r.slot] + first
    q_JE = plgpu.load(r.q_THE.at[pl.ds(row, ROWS), r.head], layout=_TILE, optimized=False)
    r.q_2JE.at[side][...] = q_JE
    plgpu.commit_smem()

    def constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    state = (
        constant(0.0, (ROWS, r.head_dim), _TILE),
        constant(_NEVER, (ROWS,), _ROW),
        constant(0.0, (ROWS,), _ROW),
    )
    # Blocks below the tile's first row are seen whole by all of its rows; both warpgroups cut at the same place.
    whole = jnp.clip(lax.div(r.position_W[r.slot], jnp.int32(r.block)), 0, r.blocks - 1)
    # The second warpgroup starts half a step late, and the first ends half a step early.
    pl.when(side == 1)(lambda: _take_turns(r))
    plgpu.barrier_wait(r.k_full.at[0])
    for start, end, masked in ((0, whole, False), (whole, r.blocks, True)):
        step = _step(r, side, position, masked)
        state = lax.fori_loop(start, end, step, state)
    pl.when(side == 0)(lambda: _take_turns(r))
    acc_JE, _, sum_J = state
    acc_JE = acc_JE * lax.broadcast_in_dim(1.0 / sum_J, acc_JE.shape, [0])
    r.o_2JE.at[side][...] = acc_JE.astype(r.o_2JE.dtype)
    plgpu.commit_smem()
    _store_rows(r, side, row, first)


def _step(r: SimpleNamespace, side: jax.Array, position: jax.Array, masked: bool) -> Any:
    """Scores, softmax and product of one key block after the other."""

    def step(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def scores(out: Any) -> jax.Array:
            _start_scores(r, side, block, out)
            _take_turns(r)
            return out[...]

        score_JL = pl.run_scoped(scores, plgpu.ACC((ROWS, r.block), jnp.float32))
        plgpu.barrier_arrive(r.k_free.at[lax.rem(block, jnp.int32(r.tuning.stages))])
        acc_JE, max_J, sum_J = state
        weight_JL, keep_J, max_J, sum_J = _softmax(r, block, position, masked, score_JL, max_J, sum_J)
        acc_JE = acc_JE * lax.broadcast_in_dim(keep_J, acc_JE.shape, [0])
        weight_JL = weight_JL.astype(r.v_SLE.dtype)
        # Else the compiler leaves this work for the turn, which it would make longer.
        acc_JE, max_J, sum_J, weight_JL = lax.optimization_barrier((acc_JE, max_J, sum_J, weight_JL))
        _take_turns(r)
        return _add_values(r, side, block, masked, weight_JL, acc_JE), max_J, sum_J

    return step


def _take_turns(r: SimpleNamespace) -> None:
    """Both warpgroups pass here twice a block, half a block apart: one multiplies while the other is in its softmax."""

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        # One of the hardware's; Mosaic takes 0 and one a warpgroup.
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [],
            "bar.sync 8, 256;",
            "",
            has_side_effects=True,
        )

    if r.tuning.turns and r.native:  # it orders nothing but time
        barrier()


def _start_scores(r: SimpleNamespace, side: jax.Array, block: jax.Array, out: Any) -> None:
    stage = lax.rem(block, jnp.int32(r.tuning.stages))
    plgpu.wgmma(out, r.q_2JE.at[side], r.k_SLE.at[stage].T)


def _softmax(
    r: SimpleNamespace,
    block: jax.Array,
    position: jax.Array,
    masked: bool,
    score_JL: jax.Array,
    max_J: jax.Array,
    sum_J: jax.Array,
) -> tuple[jax.Array, ...]:
    """Weights of a block, the factor that older results shrink by, the new maximum (of scaled scores) and sum."""
    if masked:
        row = plgpu.broadcasted_iota(jnp.int32, score_JL.shape, 0, layout=_TILE)
        token = plgpu.broadcasted_iota(jnp.int32, score_JL.shape, 1, layout=_TILE)
        score_JL = jnp.where(token - row <= position - block * r.block, score_JL, _NEVER / r.scale)
    new_max_J = jnp.maximum(max_J, score_JL.max(axis=1) * r.scale)
    keep_J = jnp.exp2(max_J - new_max_J)
    weight_JL = jnp.exp2(score_JL * r.scale - lax.broadcast_in_dim(new_max_J, score_JL.shape, [0]))
    return weight_JL, keep_J, new_max_J, sum_J * keep_J + weight_JL.sum(axis=1)


def _add_values(
    r: SimpleNamespace,
    side: jax.Array,
    block: jax.Array,
    masked: bool,
    weight_JL: jax.Array,
    acc_JE: jax.Array,
) -> jax.Array:
    """acc + weights V; gives the block's values free, and awaits the next block's keys meanwhile."""
    stage, following = (lax.rem(block + i, jnp.int32(r.tuning.stages)) for i in range(2))

    def await_keys() -> None:
        pl.when(block + 1 < r.blocks)(lambda: plgpu.barrier_wait(r.k_full.at[following]))

    plgpu.barrier_wait(r.v_full.at[stage])
    if masked:
        _clean_values(r, stage, r.keys_W[r.slot] - block * r.block)
    if r.native:

        def in_registers(out: Any) -> None:
            plgpu.wgmma(out, weight_JL, r.v_SLE.at[stage])
            await_keys()

        acc_JE = pl.run_state(in_registers)(plgpu.ACC.init(acc_JE))
    else:  # the interpreter knows neither operands in registers nor accumulators that are carried in
        r.p_2JL.at[side][...] = weight_JL
        plgpu.commit_smem()

        def product(out: Any) -> jax.Array:
            plgpu.wgmma(out, r.p_2JL.at[side], r.v_SLE.at[stage])
            return out[...]

        acc_JE += pl.run_scoped(product, plgpu.ACC(acc_JE.shape, jnp.float32))
        await_keys()
    plgpu.barrier_arrive(r.v_free.at[stage])
    return acc_JE


def _clean_values(r: SimpleNamespace, stage: jax.Array, live: jax.Array) -> None:
    """Zeroes the block's values past the last token, which may be NaN (0 * NaN is NaN).

    Both warpgroups do so, each before its own product: they write the same bytes, and need not wait for each other.
    """
    for row in range(0, r.block, PAGE_TOKENS):

        @pl.when(live < row + PAGE_TOKENS)
        def _(row: int = row) -> None:
            for column in range(0, r.head_dim, 64):
                part = r.v_SLE.at[stage, pl.ds(row, PAGE_TOKENS), pl.ds(column, 64)]
                value = plgpu.load(part, layout=_TILE, optimized=False)
                token = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_TILE)
                part[...] = jnp.where(token + row < live, value, jnp.zeros_like(value))
            plgpu.commit_smem()


def _store_rows(r: SimpleNamespace, side: jax.Array, row: jax.Array, first: jax.Array) -> None:
    """Writes the warpgroup's live rows: in one copy where all are, else row by row."""
    start = jnp.clip(r.first_live_W[r.slot] - first, 0, ROWS)
    end = jnp.clip(r.end_live_W[r.slot] - first, 0, ROWS)
    full = end - start == ROWS

    @pl.when(full)
    def _() -> None:
        plgpu.copy_smem_to_gmem(r.o_2JE.at[side], r.out_THE.at[pl.ds(row, ROWS), r.head])

    @pl.when(jnp.logical_not(full))
    def _() -> None:
        @pl.loop(start, end)
        def _(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(r.o_2JE.at[side, pl.ds(i, 1)], r.out_THE.at[pl.ds(row + i, 1), r.head])

    plgpu.wait_smem_to_gmem(0)
