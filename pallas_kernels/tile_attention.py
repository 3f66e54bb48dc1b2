"""The computing side of the prefill kernels: query tiles over key blocks, causal, for Pallas Mosaic GPU on Hopper.

One persistent CTA a multiprocessor takes (query tile, head) items. Two warpgroups compute 64 query rows each over the
same key blocks, a third copies. The product of a block's values and the scores of the next block, which may be the
first of the next item, go into the tensor cores together; while they run there, the other warpgroup is in its softmax.
Rows are packed without alignment, which a tiled copy cannot address: queries and outputs have 64-wide chunks, whose
bytes lie alike in shared memory whether they are tiled by 8 rows or by 1.
A kernel hands in `r`: what `scratch` and tile_queue.py make, the sizes below, out_THV, gaps_Z, owned_T, zero_gaps
(whether this launch does), and start_scores(side, stage, out), which starts the products of a side's queries with a
stage's keys.
Sizes: block (tokens), stages, value_dim, heads, scale (times log2 e), turns, native, clean (values past a request's end
may be NaN), registers of a computing thread.
Dimension keys beyond the contracts': S stages, L tokens of a key block, J query rows of a warpgroup, C columns of a
64-wide chunk, X chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import tile_queue
from pallas_kernels.query_tiles import TILE_TOKENS
from pallas_kernels.tile_queue import await_item, word

ROWS = 64  # query rows of a warpgroup: wgmma's M
COLUMNS = 64  # bf16 elements of a swizzled row
COPY = 2  # the warpgroup that copies
SWIZZLE = plgpu.SwizzleTransform(128)
SWIZZLED = (plgpu.TilingTransform((8, COLUMNS)), SWIZZLE)
# The same bytes as SWIZZLED for a 64-wide array, but a copy of it may begin at any row of the other side.
_ANY_ROW = (plgpu.TilingTransform((1, COLUMNS)), SWIZZLE)
TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a query row
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN


def scratch(
    dtype: Any,
    *,
    head_dim: int,
    value_dim: int,
    block: int,
    stages: int,
    key_copies: int,
    value_copies: int,
    native: bool,
) -> dict[str, Any]:
    """Shared memory and barriers but for the keys. key_copies, value_copies: that fill a stage."""

    def smem(*shape: int, transforms: Any = SWIZZLED) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def any_row(*shape: int) -> Any:
        return plgpu.RefUnion(smem(*shape), smem(*shape, transforms=_ANY_ROW)) if native else smem(*shape)

    chunks = head_dim // COLUMNS
    made = {
        "q": any_row(2, chunks, ROWS, COLUMNS),
        "v_SLV": smem(stages, block, value_dim),
        "o": any_row(2, ROWS, COLUMNS) if native else smem(2, ROWS, COLUMNS, transforms=()),
        "q_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=2),
        "q_free": plgpu.Barrier(num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=key_copies, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=value_copies, num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if not native:  # the interpreter knows no operands in registers
        made["p_2JL"] = smem(2, ROWS, block)
    return made | tile_queue.scratch()


def views(r: SimpleNamespace) -> None:
    """Names the two views of queries and outputs."""
    r.q_2XJC, r.q_any_2XJC = r.q if r.native else (r.q, r.q)
    r.o_2JC, r.o_any_2JC = r.o if r.native else (r.o, r.o)


def compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of each item over all key blocks, then their way out."""
    if r.native:
        plgpu.set_max_registers(r.registers, action="increase")
    first = jnp.int32(0)
    await_item(r, first)
    blocks = word(r, first, tile_queue.BLOCKS)

    @pl.when(blocks > 0)
    def _() -> None:
        # The second warpgroup gives the first one its first turn.
        if r.native and r.turns:
            pl.when(side == 1)(lambda: _named("bar.arrive 8, 256;"))
        _await_first(r, side, first)

        def scores(out: Any) -> jax.Array:
            _my_turn(r, side)
            r.start_scores(side, first, out)
            _your_turn(r, side)
            return out[...]

        score_JL = pl.run_scoped(scores, plgpu.ACC((ROWS, r.block), jnp.float32))
        _free_keys(r, side, first, blocks == 1)
        state = (first, blocks, first, *_first_softmax(r, side, first, score_JL))
        lax.while_loop(lambda state: state[1] > 0, lambda state: _one_item(r, side, *state), state)
        # One turn is left over.
        if r.native and r.turns:
            pl.when(side == 0)(lambda: _named("bar.sync 8, 256;"))

    # What has been issued must have left shared memory when the CTA ends.
    plgpu.wait_smem_to_gmem(0)
    pl.when((side == 0) & r.zero_gaps)(lambda: _zero_gaps(r))


def _one_item(
    r: SimpleNamespace,
    side: jax.Array,
    turn: jax.Array,
    blocks: jax.Array,
    done: jax.Array,
    weight_JL: jax.Array,
    max_J: jax.Array,
    sum_J: jax.Array,
) -> tuple[jax.Array, ...]:
    """Of an item, whose first block is in the weights, maximum and sum already. done: blocks of the items before.

    Gives the same for the next item.
    """
    position = word(r, turn, tile_queue.POSITION) + side * ROWS
    acc_JV = plgpu.layout_cast(jnp.zeros((ROWS, r.value_dim), jnp.float32), TILE)

    def step(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc_JV, weight_JL, max_J, sum_J = state
        count = done + block
        stage = lax.rem(count, jnp.int32(r.stages))
        next_stage = lax.rem(count + 1, jnp.int32(r.stages))
        plgpu.barrier_wait(r.v_full.at[stage])
        acc_JV, score_JL = _pair(
            r, side, stage, next_stage, weight_JL, acc_JV, lambda: plgpu.barrier_wait(r.k_full.at[next_stage])
        )
        plgpu.barrier_arrive(r.v_free.at[stage])
        _free_keys(r, side, next_stage, block + 2 == blocks)
        new_JL, keep_J, max_J, sum_J = _softmax(r, block + 1, position, score_JL, max_J, sum_J)
        acc_JV = acc_JV * lax.broadcast_in_dim(keep_J, acc_JV.shape, [0])
        return acc_JV, new_JL, max_J, sum_J

    acc_JV, weight_JL, max_J, sum_J = lax.fori_loop(0, blocks - 1, step, (acc_JV, weight_JL, max_J, sum_J))
    done = done + blocks
    stage = lax.rem(done - 1, jnp.int32(r.stages))
    next_stage = lax.rem(done, jnp.int32(r.stages))
    await_item(r, turn + 1)
    next_blocks = word(r, turn + 1, tile_queue.BLOCKS)
    more = next_blocks > 0
    plgpu.barrier_wait(r.v_full.at[stage])
    if r.clean:
        _clean_values(r, stage, word(r, turn, tile_queue.KEYS) - (blocks - 1) * r.block)
    # After the last item these scores are of whatever lies there, and are not used.
    acc_JV, score_JL = _pair(
        r, side, stage, next_stage, weight_JL, acc_JV, lambda: pl.when(more)(lambda: _await_first(r, side, next_stage))
    )
    plgpu.barrier_arrive(r.v_free.at[stage])
    pl.when(more)(lambda: _free_keys(r, side, next_stage, next_blocks == 1))
    acc_JV = acc_JV * lax.broadcast_in_dim(1.0 / sum_J, acc_JV.shape, [0])
    store = _store(r, side, turn, acc_JV.astype(r.out_THV.dtype))
    store(0)
    first = _first_softmax(r, side, turn + 1, score_JL)
    for column in range(COLUMNS, r.value_dim, COLUMNS):  # the softmax hides that the columns before leave
        store(column)
    return turn + 1, next_blocks, done, *first


def _await_first(r: SimpleNamespace, side: jax.Array, stage: jax.Array) -> None:
    plgpu.barrier_wait(r.q_full.at[side])
    plgpu.barrier_wait(r.k_full.at[stage])


def _free_keys(r: SimpleNamespace, side: jax.Array, stage: jax.Array, last: jax.Array) -> None:
    """Gives a block's keys free, and after the last block the queries."""
    plgpu.barrier_arrive(r.k_free.at[stage])
    pl.when(last)(lambda: plgpu.barrier_arrive(r.q_free.at[side]))


def _pair(
    r: SimpleNamespace,
    side: jax.Array,
    stage: jax.Array,
    next_stage: jax.Array,
    weight_JL: jax.Array,
    acc_JV: jax.Array,
    await_keys: Callable[[], None],
) -> tuple[jax.Array, jax.Array]:
    """acc + weights V of one block, and the scores of the next, whose keys are awaited in between."""

    def native(out: Any) -> tuple[jax.Array, jax.Array]:
        def both(acc: Any) -> None:
            _my_turn(r, side)
            plgpu.wgmma(acc, weight_JL, r.v_SLV.at[stage])
            await_keys()
            r.start_scores(side, next_stage, out)
            _your_turn(r, side)

        added = pl.run_state(both)(plgpu.ACC.init(acc_JV))
        return added, out[...]

    def interpreted(out: Any, acc: Any) -> tuple[jax.Array, jax.Array]:
        r.p_2JL.at[side][...] = weight_JL
        plgpu.commit_smem()
        plgpu.wgmma(acc, r.p_2JL.at[side], r.v_SLV.at[stage])
        await_keys()
        r.start_scores(side, next_stage, out)
        return acc_JV + acc[...], out[...]

    scores = plgpu.ACC((ROWS, r.block), jnp.float32)
    if r.native:
        return pl.run_scoped(native, scores)
    # The interpreter knows neither operands in registers nor accumulators that are carried in.
    return pl.run_scoped(interpreted, scores, plgpu.ACC(acc_JV.shape, jnp.float32))


def _first_softmax(
    r: SimpleNamespace, side: jax.Array, turn: jax.Array, score_JL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    never_J = plgpu.layout_cast(jnp.full((ROWS,), _NEVER, jnp.float32), _ROW)
    zero_J = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
    position = word(r, turn, tile_queue.POSITION) + side * ROWS
    weight_JL, _, max_J, sum_J = _softmax(r, jnp.int32(0), position, score_JL, never_J, zero_J)
    return weight_JL, max_J, sum_J


def _softmax(
    r: SimpleNamespace,
    block: jax.Array,
    position: jax.Array,
    score_JL: jax.Array,
    max_J: jax.Array,
    sum_J: jax.Array,
) -> tuple[jax.Array, ...]:
    """Weights of a block, the factor that older results shrink by, the new maximum (of scaled scores) and sum."""
    last_seen = position - block * r.block  # by the first row

    def masked(score_JL: jax.Array) -> jax.Array:
        last_J = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW) + last_seen
        token_JL = plgpu.broadcasted_iota(jnp.int32, score_JL.shape, 1, layout=TILE)
        seen_JL = token_JL <= lax.broadcast_in_dim(last_J, score_JL.shape, [0])
        return jnp.where(seen_JL, score_JL, _NEVER / r.scale)

    score_JL = lax.cond(last_seen < r.block - 1, masked, lambda score_JL: score_JL, score_JL)
    new_max_J = jnp.maximum(max_J, score_JL.max(axis=1) * r.scale)
    keep_J = jnp.exp2(max_J - new_max_J)
    weight_JL = jnp.exp2(score_JL * r.scale - lax.broadcast_in_dim(new_max_J, score_JL.shape, [0]))
    return weight_JL.astype(r.v_SLV.dtype), keep_J, new_max_J, sum_J * keep_J + weight_JL.sum(axis=1)


def _clean_values(r: SimpleNamespace, stage: jax.Array, live: jax.Array) -> None:
    """Zeroes a block's values past its first `live` ones, which may be NaN (0 * NaN is NaN).

    Both warpgroups do so, each before its own product: they write the same bytes, and need not wait for each other.
    """
    rows = min(r.block, 64)
    for row in range(0, r.block, rows):

        @pl.when(live < row + rows)
        def _(row: int = row) -> None:
            for column in range(0, r.value_dim, COLUMNS):
                part = r.v_SLV.at[stage, pl.ds(row, rows), pl.ds(column, COLUMNS)]
                value = plgpu.load(part, layout=TILE, optimized=False)
                token = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=TILE)
                part[...] = jnp.where(token + row < live, value, jnp.zeros_like(value))
            plgpu.commit_smem()


def _named(text: str) -> None:
    """A named barrier of the hardware."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    run()


def _my_turn(r: SimpleNamespace, side: jax.Array) -> None:
    if r.native and r.turns:
        pl.when(side == 0)(lambda: _named("bar.sync 8, 256;"))
        pl.when(side == 1)(lambda: _named("bar.sync 9, 256;"))


def _your_turn(r: SimpleNamespace, side: jax.Array) -> None:
    if r.native and r.turns:
        pl.when(side == 0)(lambda: _named("bar.arrive 9, 256;"))
        pl.when(side == 1)(lambda: _named("bar.arrive 8, 256;"))


def _store(r: SimpleNamespace, side: jax.Array, turn: jax.Array, out_JV: jax.Array) -> Callable[[int], None]:
    """Gives what writes 64 columns of the warpgroup's live rows: in one copy where all are live, else row by row."""
    first = side * ROWS
    row, head = word(r, turn, tile_queue.ROW) + first, word(r, turn, tile_queue.HEAD)
    start = jnp.clip(word(r, turn, tile_queue.FIRST_LIVE) - first, 0, ROWS)
    end = jnp.clip(word(r, turn, tile_queue.END_LIVE) - first, 0, ROWS)
    full = end - start == ROWS

    def store(column: int) -> None:
        columns = pl.ds(column, COLUMNS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        r.o_2JC.at[side][...] = out_JV[:, column : column + COLUMNS]
        plgpu.commit_smem()

        @pl.when(full)
        def _() -> None:
            plgpu.copy_smem_to_gmem(r.o_any_2JC.at[side], r.out_THV.at[pl.ds(row, ROWS), head, columns])

        @pl.when(jnp.logical_not(full))
        def _() -> None:
            @pl.loop(start, end)
            def _(i: jax.Array) -> None:
                part = r.out_THV.at[pl.ds(row + i, 1), head, columns]
                plgpu.copy_smem_to_gmem(r.o_any_2JC.at[side, pl.ds(i, 1)], part)

    return store


def _zero_gaps(r: SimpleNamespace) -> None:
    """Zeroes the rows of no chunk, one block of TILE_TOKENS packed rows after the other. Most blocks have none."""
    tokens, width = r.out_THV.shape[0], max(n for n in range(1, min(r.heads, ROWS) + 1) if r.heads % n == 0)
    zeros = jnp.zeros((ROWS, COLUMNS), r.out_THV.dtype)
    r.o_2JC.at[0][...] = plgpu.layout_cast(zeros, TILE)
    plgpu.commit_smem()

    @pl.loop(0, lax.div(r.gaps_Z.shape[0] - r.cta + (r.ctas - 1), jnp.int32(r.ctas)))
    def _(turn: jax.Array) -> None:
        block = turn * r.ctas + r.cta

        @pl.when(r.gaps_Z[block] > 0)
        def _() -> None:
            first = block * TILE_TOKENS

            @pl.loop(first, jnp.minimum(first + TILE_TOKENS, tokens))
            def _(row: jax.Array) -> None:
                @pl.when(r.owned_T[row] == 0)
                def _() -> None:
                    for head in range(0, r.heads, width):
                        for column in range(0, r.value_dim, COLUMNS):
                            part = r.out_THV.at[row, pl.ds(head, width), pl.ds(column, COLUMNS)]
                            plgpu.copy_smem_to_gmem(r.o_any_2JC.at[0, pl.ds(0, width)], part)

    plgpu.wait_smem_to_gmem(0)
