"""A second Hopper kernel of gqa_prefill: persistent CTAs that draw query tiles from a work list. Not yet timed.

Two warpgroups compute 64 query rows each over the same key blocks; a third copies pages into shared memory, one copy
a page, and the next tile's queries under the last block of this one. The scores of the next key block go into the
tensor cores before the product of this one, so that its softmax runs under that product. Two query heads of one kv
head may form a cluster: each CTA copies half of a page into both. NOTES.md has the design and figures.
Dimension keys beyond the contract's: W tile slots, S stages, L tokens of a key block, J query rows of a warpgroup,
C columns of 64, D of such columns in a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.gqa_prefill.kernel import PAGE_TOKENS, ROWS, TILE_TOKENS
from pallas_kernels.gqa_prefill.tiles import Gaps, Tiles

COLUMNS = 64  # bf16 of 128 bytes, the widest swizzle
_SWIZZLE = plgpu.SwizzleTransform(128)
_SWIZZLED = (plgpu.TilingTransform((8, COLUMNS)), _SWIZZLE)
_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a query row
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_COPY = 2  # the warpgroup that copies
_TURN = 8  # the first of two named barriers; Mosaic takes 0 and one a warpgroup


@dataclass(frozen=True, slots=True)
class Persistent:
    """What may be tuned for a device."""

    pages: int = 2  # of a key block
    stages: int = 2  # key blocks in flight
    cluster: int = 1  # query heads of one kv head that share the copies of its pages: 1 or 2
    turns: bool = True  # the warpgroups take turns at the tensor cores
    ctas: int = 132  # one an SM; a multiple of cluster
    compute_registers: int = 240
    copy_registers: int = 24


class _Tile(NamedTuple):
    """What the warpgroups need of a tile."""

    chunk: jax.Array
    head: jax.Array
    row: jax.Array
    position: jax.Array
    first_live: jax.Array
    end_live: jax.Array
    keys: jax.Array


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
    tuning: Persistent,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, E] in q's dtype, zeros for rows of no chunk. k_PKE, v_PKE: page * N + head is the first axis."""
    _, heads, head_dim = q_THE.shape
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "parts": head_dim // COLUMNS,
        "block": tuning.pages * PAGE_TOKENS,
        "scale": scale * math.log2(math.e),
        "tuning": tuning,
        "native": interpret is None,
    }

    def gqa_prefill_tile(*refs: Any, **scratch: Any) -> None:
        names = (*Tiles._fields, *Gaps._fields, "table_RM", "q_THE", "k_PKE", "v_PKE", "out_THE")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        # One memory in two forms, the same bytes: rows one by one for copies, tiles of 8 rows for the rest.
        r.q_rows, r.q = r.q_2DJC if r.native else (r.q_2DJC, r.q_2DJC)
        r.o_rows, r.o = r.o_2DJC if r.native else (r.o_2DJC, r.o_2DJC)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < _COPY)(lambda: _compute(r, warpgroup))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    shape = (2, head_dim // COLUMNS, ROWS, COLUMNS)
    tiled = plgpu.SMEM(shape, q_THE.dtype, transforms=_SWIZZLED)
    both = tiled if interpret else plgpu.RefUnion(plgpu.SMEM(shape, q_THE.dtype, transforms=(_SWIZZLE,)), tiled)
    stages = tuning.stages
    free = (
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=stages)
        if tuning.cluster > 1
        else plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    )
    buffer = plgpu.SMEM((stages, tuning.pages * PAGE_TOKENS, head_dim), q_THE.dtype, transforms=_SWIZZLED)
    scratch_types = {
        "q_2DJC": both,
        "o_2DJC": both,
        "k_SLE": buffer,
        "v_SLE": buffer,
        "q_full": plgpu.Barrier(num_arrivals=2 * sizes["parts"]),
        "q_free": plgpu.Barrier(num_arrivals=2),
        "k_full": plgpu.Barrier(num_arrivals=tuning.pages, num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=tuning.pages, num_barriers=stages),
        "k_free": free,
        "v_free": free,
    }
    if interpret is not None:
        scratch_types["p_2JL"] = plgpu.SMEM((2, ROWS, sizes["block"]), q_THE.dtype, transforms=_SWIZZLED)
    call = plgpu.kernel(
        gqa_prefill_tile,
        out_type=jax.ShapeDtypeStruct(q_THE.shape, q_THE.dtype),
        scratch_types=scratch_types,
        grid=(tuning.ctas // tuning.cluster,),
        grid_names=("group",),
        cluster=(tuning.cluster,) if tuning.cluster > 1 else (),
        cluster_names=("cluster",) if tuning.cluster > 1 else (),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return call(*tiles, *gaps, table_RM, q_THE, k_PKE, v_PKE)


def _for_each_tile(r: SimpleNamespace, visit: Callable[[jax.Array, _Tile, jax.Array], None]) -> tuple[Any, Any]:
    """visit(number, tile, key blocks before it) for each tile of this CTA. Returns how many tiles and key blocks.

    The longest tiles come first, and the order of CTAs turns from round to round: who had the shortest tile of one
    round has the longest of the next. The next tile's record is read before the tile, which hides its latency.
    """
    group, groups = lax.axis_index("group"), jnp.int32(r.tuning.ctas // r.tuning.cluster)
    sets = r.heads // r.tuning.cluster  # of heads that a cluster takes
    items = r.used_1[0] * sets

    def place(number: jax.Array) -> jax.Array:
        return number * groups + jnp.where(lax.rem(number, jnp.int32(2)) == 0, group, groups - 1 - group)

    def read(number: jax.Array) -> _Tile:
        item = jnp.minimum(place(number), r.keys_W.shape[0] * sets - 1)
        slot = lax.div(item, jnp.int32(sets))
        head = lax.rem(item, jnp.int32(sets)) * r.tuning.cluster
        if r.tuning.cluster > 1:
            head += lax.axis_index("cluster")
        fields = (r.row_W, r.position_W, r.first_live_W, r.end_live_W, r.keys_W)
        return _Tile(r.chunk_W[slot], head, *(field[slot] for field in fields))

    def one(number: jax.Array, state: tuple[_Tile, jax.Array]) -> tuple[_Tile, jax.Array]:
        tile, done = state
        following = read(number + 1)
        visit(number, tile, done)
        return following, done + _blocks(r, tile)

    zero = jnp.int32(0)
    whole = lax.div(items, groups)
    count = whole + (place(whole) < items).astype(jnp.int32)
    _, done = lax.fori_loop(zero, count, one, (read(zero), zero))
    return count, done


def _blocks(r: SimpleNamespace, tile: _Tile) -> jax.Array:
    return lax.div(tile.keys + (r.block - 1), jnp.int32(r.block))


def _stage(r: SimpleNamespace, index: jax.Array) -> jax.Array:
    return lax.rem(index, jnp.int32(r.tuning.stages))


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: queries of the tiles, and pages of keys and values, `stages` key blocks ahead."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    stages, pages = r.tuning.stages, r.tuning.pages
    last_page = r.k_PKE.shape[0] // r.kv_heads - 1

    def visit(number: jax.Array, tile: _Tile, done: jax.Array) -> None:
        kv_head = lax.div(tile.head, jnp.int32(r.heads // r.kv_heads))

        def places(block: jax.Array) -> tuple[jax.Array, ...]:
            # The last block may reach past the request's pages, where entries may be anything.
            indices = [jnp.minimum(block * pages + i, r.table_RM.shape[1] - 1) for i in range(pages)]
            return tuple(jnp.clip(r.table_RM[tile.chunk, i], 0, last_page) * r.kv_heads + kv_head for i in indices)

        def fetch(kind: str, index: jax.Array, now: tuple[jax.Array, ...]) -> None:
            pool, buffer, full, free = (getattr(r, kind + name) for name in ("_PKE", "_SLE", "_full", "_free"))
            stage = _stage(r, index)
            pl.when(index >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
            for i, place in enumerate(now):
                rows = pl.ds(i * PAGE_TOKENS, PAGE_TOKENS)
                both = "cluster" if r.tuning.cluster > 1 else None
                plgpu.copy_gmem_to_smem(pool.at[place], buffer.at[stage, rows], full.at[stage], collective_axes=both)

        def step(block: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = places(block + 1)  # read before the waits, which then hide its latency
            fetch("k", done + block, now)

            @pl.when(block == 0)
            def _() -> None:
                pl.when(number > 0)(lambda: plgpu.barrier_wait(r.q_free))
                for side in range(2):
                    for part in range(r.parts):
                        rows, columns = pl.ds(tile.row + side * ROWS, ROWS), pl.ds(part * COLUMNS, COLUMNS)
                        plgpu.copy_gmem_to_smem(r.q_THE.at[rows, tile.head, columns], r.q_rows.at[side, part], r.q_full)

            fetch("v", done + block, now)
            return following

        lax.fori_loop(0, _blocks(r, tile), step, places(jnp.int32(0)))

    count, done = _for_each_tile(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    pl.when(count > 0)(lambda: plgpu.barrier_wait(r.q_free))

    @pl.loop(jnp.maximum(done - stages, 0), done)
    def _(index: jax.Array) -> None:
        plgpu.barrier_wait(r.k_free.at[_stage(r, index)])
        plgpu.barrier_wait(r.v_free.at[_stage(r, index)])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of each tile over all key blocks, then their way out."""
    if r.native:
        plgpu.set_max_registers(r.tuning.compute_registers, action="increase")

    def visit(number: jax.Array, tile: _Tile, done: jax.Array) -> None:
        del number
        plgpu.barrier_wait(r.q_full)
        acc_JE, sum_J = _attend(r, side, tile, done)
        acc_JE = (acc_JE * lax.broadcast_in_dim(1.0 / sum_J, acc_JE.shape, [0])).astype(r.out_THE.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
        for part in range(r.parts):
            r.o.at[side, part][...] = acc_JE[:, part * COLUMNS : (part + 1) * COLUMNS]
        plgpu.commit_smem()
        _store_rows(r, side, tile)

    # The second warpgroup starts by giving the first one its turn, and the first ends by taking the last one.
    pl.when(side == 1)(lambda: _give_turn(r, side))
    _for_each_tile(r, visit)
    pl.when(side == 0)(lambda: _take_turn(r, side))
    pl.when(side == 0)(lambda: _zero_gaps(r))
    plgpu.wait_smem_to_gmem(0)


def _named(r: SimpleNamespace, number: int, what: str) -> None:
    """A named barrier of the hardware between the two computing warpgroups. It orders nothing but time."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        text = f"bar.{what} {number}, 256;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    if r.native and r.tuning.turns:
        run()


def _take_turn(r: SimpleNamespace, side: jax.Array) -> None:
    for i in range(2):
        pl.when(side == i)(lambda i=i: _named(r, _TURN + i, "sync"))


def _give_turn(r: SimpleNamespace, side: jax.Array) -> None:
    for i in range(2):
        pl.when(side == i)(lambda i=i: _named(r, _TURN + 1 - i, "arrive"))


def _attend(r: SimpleNamespace, side: jax.Array, tile: _Tile, done: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of values, [J, E] fp32, and the sum of weights, [J] fp32, of a warpgroup's rows."""
    blocks = _blocks(r, tile)
    # Blocks below the tile's first row are seen whole by all of its rows.
    whole = jnp.clip(lax.div(tile.position, jnp.int32(r.block)), 0, blocks)

    def constant(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _ROW)

    def first(out: Any) -> jax.Array:
        plgpu.barrier_wait(r.k_full.at[_stage(r, done)])
        _take_turn(r, side)
        _start_scores(r, side, done, out)
        _give_turn(r, side)
        return out[...]

    def all_steps(acc: Any) -> tuple[jax.Array, ...]:
        score_JL = pl.run_scoped(first, plgpu.ACC((ROWS, r.block), jnp.float32))
        _keys_read(r, jnp.int32(0), blocks, done)
        weight_JL, _, max_J, sum_J = _softmax(
            r, side, tile, jnp.int32(0), True, score_JL, constant(_NEVER), constant(0.0)
        )
        carried = (weight_JL.astype(r.v_SLE.dtype), max_J, sum_J)
        if not r.native:  # the interpreter knows no accumulators that are written to
            carried += (jnp.zeros((ROWS, r.head_dim), jnp.float32),)
        plgpu.barrier_wait(r.v_full.at[_stage(r, done)])
        for start, end, masked in ((0, whole - 1, False), (jnp.maximum(whole - 1, 0), blocks - 1, True)):
            step = _step(r, side, tile, blocks, done, acc, masked)
            carried = lax.fori_loop(start, end, step, carried)
        weight_JL, _, sum_J, *old = carried
        last = _stage(r, done + blocks - 1)
        _clean_values(r, last, tile.keys - (blocks - 1) * r.block)
        _take_turn(r, side)
        found = _start_values(r, side, last, acc, weight_JL, *old)
        _give_turn(r, side)
        acc_JE = acc[...] if r.native else found
        plgpu.barrier_arrive(r.v_free.at[last])
        return acc_JE, sum_J

    return pl.run_scoped(all_steps, plgpu.ACC((ROWS, r.head_dim), jnp.float32))


def _step(
    r: SimpleNamespace, side: jax.Array, tile: _Tile, blocks: jax.Array, done: jax.Array, acc: Any, masked: bool
) -> Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """Scores and softmax of block b + 1 around the product of block b."""

    def run(block: jax.Array, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weight_JL, max_J, sum_J, *old = carried
        stage, following = _stage(r, done + block), _stage(r, done + block + 1)

        def under(out: Any) -> tuple[jax.Array, ...]:
            plgpu.barrier_wait(r.k_full.at[following])
            _take_turn(r, side)
            _start_scores(r, side, done + block + 1, out)
            old_JE = _start_values(r, side, stage, acc, weight_JL, *old)
            _give_turn(r, side)
            score_JL = plgpu.wgmma_accumulator_load(out, wait_n=1) if r.native else out[...]
            _keys_read(r, block + 1, blocks, done)
            new_JL, keep_J, new_max_J, new_sum_J = _softmax(r, side, tile, block + 1, masked, score_JL, max_J, sum_J)
            # Barrier and wait keep the compiler from moving the softmax behind the product that is to hide it.
            new_JL, keep_J, new_max_J, new_sum_J = lax.optimization_barrier((new_JL, keep_J, new_max_J, new_sum_J))
            plgpu.barrier_wait(r.v_full.at[following])
            if r.native:
                old_JE = acc[...]
            plgpu.barrier_arrive(r.v_free.at[stage])
            new_JE = old_JE * lax.broadcast_in_dim(keep_J, old_JE.shape, [0])
            if r.native:
                acc[...] = new_JE
            # Rounded only now: ptxas lets no product run while another one's operands are made.
            return new_JL.astype(r.v_SLE.dtype), new_max_J, new_sum_J, *(() if r.native else (new_JE,))

        return pl.run_scoped(under, plgpu.ACC((ROWS, r.block), jnp.float32))

    return run


def _start_scores(r: SimpleNamespace, side: jax.Array, index: jax.Array, out: Any) -> None:
    for part in range(r.parts):
        keys = r.k_SLE.at[_stage(r, index), :, pl.ds(part * COLUMNS, COLUMNS)]
        plgpu.wgmma(out, r.q.at[side, part], keys.T)


def _keys_read(r: SimpleNamespace, block: jax.Array, blocks: jax.Array, done: jax.Array) -> None:
    """Gives the keys of a block free, and after a tile's last block its queries."""
    plgpu.barrier_arrive(r.k_free.at[_stage(r, done + block)])
    pl.when(block == blocks - 1)(lambda: plgpu.barrier_arrive(r.q_free))


def _start_values(
    r: SimpleNamespace, side: jax.Array, stage: jax.Array, acc: Any, weight_JL: jax.Array, *old: jax.Array
) -> jax.Array | None:
    """acc + weights V: in flight then; in the interpreter, which knows no operands in registers, old + weights V."""
    if r.native:
        return plgpu.wgmma(acc, weight_JL, r.v_SLE.at[stage])
    r.p_2JL.at[side][...] = weight_JL
    plgpu.commit_smem()

    def product(out: Any) -> jax.Array:
        plgpu.wgmma(out, r.p_2JL.at[side], r.v_SLE.at[stage])
        return out[...]

    return old[0] + pl.run_scoped(product, plgpu.ACC(old[0].shape, jnp.float32))


def _softmax(
    r: SimpleNamespace,
    side: jax.Array,
    tile: _Tile,
    block: jax.Array,
    masked: bool,
    score_JL: jax.Array,
    max_J: jax.Array,
    sum_J: jax.Array,
) -> tuple[jax.Array, ...]:
    """Weights of a block, the factor that older results shrink by, the new maximum (of scaled scores) and sum."""
    if masked:
        row = plgpu.broadcasted_iota(jnp.int32, score_JL.shape, 0, layout=_TILE)
        token = plgpu.broadcasted_iota(jnp.int32, score_JL.shape, 1, layout=_TILE)
        seen = tile.position + side * ROWS - block * r.block
        score_JL = jnp.where(token - row <= seen, score_JL, _NEVER / r.scale)
    new_max_J = jnp.maximum(max_J, score_JL.max(axis=1) * r.scale)
    keep_J = jnp.exp2(max_J - new_max_J)
    weight_JL = jnp.exp2(score_JL * r.scale - lax.broadcast_in_dim(new_max_J, score_JL.shape, [0]))
    return weight_JL, keep_J, new_max_J, sum_J * keep_J + weight_JL.sum(axis=1)


def _clean_values(r: SimpleNamespace, stage: jax.Array, live: jax.Array) -> None:
    """Zeroes the block's values past the last token, which may be NaN (0 * NaN is NaN).

    Both warpgroups do so, each before its own product: they write the same bytes, and need not wait for each other.
    """
    for row in range(0, r.block, PAGE_TOKENS):

        @pl.when(live < row + PAGE_TOKENS)
        def _(row: int = row) -> None:
            for column in range(0, r.head_dim, COLUMNS):
                part = r.v_SLE.at[stage, pl.ds(row, PAGE_TOKENS), pl.ds(column, COLUMNS)]
                value = plgpu.load(part, layout=_TILE, optimized=False)
                token = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_TILE)
                part[...] = jnp.where(token + row < live, value, jnp.zeros_like(value))
            plgpu.commit_smem()


def _store_rows(r: SimpleNamespace, side: jax.Array, tile: _Tile) -> None:
    """Writes the warpgroup's live rows, a power of two in one copy."""
    first = side * ROWS
    start = jnp.clip(tile.first_live - first, 0, ROWS)
    count = jnp.clip(tile.end_live - first, 0, ROWS) - start
    for power in reversed(range(ROWS.bit_length())):
        width = 1 << power

        @pl.when((count & width) != 0)
        def _(start: jax.Array = start, width: int = width) -> None:
            for part in range(r.parts):
                rows, columns = pl.ds(tile.row + first + start, width), pl.ds(part * COLUMNS, COLUMNS)
                plgpu.copy_smem_to_gmem(
                    r.o_rows.at[side, part, pl.ds(start, width)], r.out_THE.at[rows, tile.head, columns]
                )

        start += count & width


def _zero_gaps(r: SimpleNamespace) -> None:
    """Zeroes the rows of no chunk: each CTA looks through some blocks of TILE_TOKENS packed rows. Most have none."""
    cta = lax.axis_index("group") * r.tuning.cluster
    if r.tuning.cluster > 1:
        cta += lax.axis_index("cluster")
    width = max(n for n in range(1, min(r.heads, ROWS) + 1) if r.heads % n == 0)

    @pl.loop(cta, r.rows_Z.shape[0], step=r.tuning.ctas)
    def _(block: jax.Array) -> None:
        @pl.when(r.rows_Z[block] > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), r.out_THE.dtype), _TILE)
            r.o.at[0, 0][...] = zeros
            plgpu.commit_smem()
            first = block * TILE_TOKENS

            @pl.loop(first, jnp.minimum(first + TILE_TOKENS, r.out_THE.shape[0]))
            def _(row: jax.Array) -> None:
                @pl.when(r.owned_T[row] == 0)
                def _() -> None:
                    for head in range(0, r.heads, width):
                        for part in range(r.parts):
                            target = r.out_THE.at[row, pl.ds(head, width), pl.ds(part * COLUMNS, COLUMNS)]
                            plgpu.copy_smem_to_gmem(r.o_rows.at[0, 0, pl.ds(0, width)], target)
