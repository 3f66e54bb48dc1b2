"""The Hopper attention kernel of mla_prefill in Pallas Mosaic GPU: query tiles over expanded keys and values.

One persistent CTA a multiprocessor takes (query tile, head) items. Two warpgroups compute 64 query rows each over the
same key blocks, a third copies. The product of a block's values and the scores of the next block, which may be the
first of the next item, go into the tensor cores together; while they run there, the other warpgroup is in its softmax.
Keys come in two parts: the expanded one from scratch rows, the shared rope part from the latent pages themselves.
NOTES.md has the design and figures.
Dimension keys beyond the contract's: W tile slots, S stages, L tokens of a key block, J query rows of a warpgroup,
C columns of a 64-wide chunk, X chunks, Z scratch rows, N nope dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mla_prefill.common import COLUMNS, COPY, PAGE_TOKENS, ROWS, SWIZZLE, SWIZZLED, TILE, Tuning
from pallas_kernels.mla_prefill.tiles import BASE, CHUNK, END_LIVE, FIRST_LIVE, KEYS, POSITION, ROW, TILE_TOKENS, Work

# The same bytes as SWIZZLED for a 64-wide array, but a copy into it may begin at any row of its source.
_ANY_ROW = (plgpu.TilingTransform((1, COLUMNS)), SWIZZLE)
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a query row
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_TAKEN = 4  # items whose words are kept: more than the warpgroups can be apart
_BLOCKS, _POSITION, _ROW_AT, _FIRST_LIVE, _END_LIVE, _HEAD = range(6)  # the words of an item


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "tuning", "interpret"))
def attend(
    q_THE: jax.Array,
    latent_PKL: jax.Array,
    key_ZN: jax.Array,
    value_ZV: jax.Array,
    table_RM: jax.Array,
    pass_1: jax.Array,
    counter_1: jax.Array,
    work: Work,
    *,
    scale: float,
    tuning: Tuning,
    into_THV: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, V] in q's dtype, of the heads of a pass; zeros for rows of no chunk in pass 0.

    key_ZN, value_ZV: as `expand` leaves them for that pass. into_THV: the array to write the result into, in place.
    counter_1: int32 0, used up.
    """
    _, heads, head_dim = q_THE.shape
    value_dim, nope_dim = value_ZV.shape[1], key_ZN.shape[1]
    block, stages, dtype = tuning.block, tuning.stages, q_THE.dtype
    native = interpret is None
    sizes = {
        "heads": heads,
        "head_dim": head_dim,
        "nope_dim": nope_dim,
        "rope_at": latent_PKL.shape[2] - (head_dim - nope_dim),
        "value_dim": value_dim,
        "block": block,
        "stages": stages,
        "scale": scale * math.log2(math.e),
        "tuning": tuning,
        "native": native,
    }
    chunks = head_dim // COLUMNS

    def mla_prefill_tile(*refs: Any, **scratch: Any) -> None:
        names = (*Work._fields, "table_RM", "pass_1", "q_THE", "latent_PKL", "key_ZN", "value_ZV")
        # The result is an output or a reference, and comes after or before the counter.
        names = (*names, *(("out_THV", "counter_1") if into_THV is not None else ("counter_1", "out_THV")))
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        r.q_2XJC, r.q_any_2XJC = r.q if native else (r.q, r.q)
        r.o_2JC, r.o_any_2JC = r.o if native else (r.o, r.o)
        r.cta = lax.axis_index("cta")
        warpgroup = lax.axis_index("warpgroup")
        r.first_head = r.pass_1[0] * r.sizes_4[2]
        r.total = r.sizes_4[0] * jnp.clip(heads - r.first_head, 0, r.sizes_4[2])
        pl.when(warpgroup < COPY)(lambda: _compute(r, warpgroup))
        pl.when(warpgroup == COPY)(lambda: _copy(r))

    def smem(shape: tuple[int, ...], transforms: Any = SWIZZLED) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    q_shape, o_shape = (2, chunks, ROWS, COLUMNS), (2, ROWS, COLUMNS)
    scratch_types = {
        "q": plgpu.RefUnion(smem(q_shape), smem(q_shape, _ANY_ROW)) if native else smem(q_shape),
        "k_SLN": smem((stages, block, nope_dim)),
        "rope_SLC": smem((stages, block, COLUMNS)),
        "v_SLV": smem((stages, block, value_dim)),
        "o": plgpu.RefUnion(smem(o_shape), smem(o_shape, _ANY_ROW)) if native else smem(o_shape, ()),
        "q_full": plgpu.Barrier(num_arrivals=chunks, num_barriers=2),
        "q_free": plgpu.Barrier(num_barriers=2),
        "k_full": plgpu.Barrier(num_arrivals=1 + block // PAGE_TOKENS, num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "k_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "index_1": plgpu.SMEM((1,), jnp.int32),
        "item_4W": plgpu.SMEM((_TAKEN, 8), jnp.int32),
        "item_full": plgpu.Barrier(num_barriers=_TAKEN),
    }
    if not native:
        scratch_types["p_2JL"] = smem((2, ROWS, block))
    call = plgpu.kernel(
        mla_prefill_tile,
        out_type=jax.ShapeDtypeStruct((*q_THE.shape[:2], value_dim), dtype) if into_THV is None else (),
        scratch_types=scratch_types,
        grid=(tuning.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    arrays = (*work, table_RM, pass_1, q_THE, latent_PKL, key_ZN, value_ZV)
    counter = jax.new_ref(counter_1)
    if into_THV is None:
        return call(*arrays, counter)
    out = jax.new_ref(into_THV)
    call(*arrays, out, counter)
    return jax.freeze(out)


def _take(r: SimpleNamespace, turn: jax.Array) -> jax.Array:
    """The CTA's item of a turn, by the copying warpgroup: the next one that no CTA has, in the order of items."""
    if not r.native:  # the interpreter has no atomics: shares in turn
        return r.cta + turn * r.tuning.ctas

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_: Any, counter: Any, place: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        pointers = [mgpu.memref_ptr(counter), mgpu.memref_ptr(place)]
        with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
            text = "{.reg .u32 t; atom.relaxed.gpu.global.add.u32 t, [$0], 1;add.u32 t, t, $2; st.shared.u32 [$1], t;}"
            first = mgpu.c(r.tuning.ctas, word)
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [*pointers, first], text, "l,r,r", has_side_effects=True)
        mgpu.warpgroup_barrier()

    take(r.counter_1, r.index_1)
    return r.index_1[0]


def _announce(r: SimpleNamespace, turn: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
    """Looks an item up and leaves its words in shared memory, for the computing warpgroups: 0 blocks past the last.

    Gives what the copies take: blocks, packed row, head, chunk, scratch row of the first token.
    """
    blocks = index < r.total
    index = jnp.clip(index, 0, jnp.maximum(r.total - 1, 0))
    # A section is all tiles of some heads: as many as the L2 cache can hold the keys and values of.
    in_section = r.sizes_4[0] * r.sizes_4[3]
    section = lax.div(index, jnp.maximum(in_section, 1))
    index = index - section * in_section
    slot = lax.div(index, r.sizes_4[3])
    pass_head = section * r.sizes_4[3] + index - slot * r.sizes_4[3]
    keys, row, chunk, base = (r.tile_W8[slot, word] for word in (KEYS, ROW, CHUNK, BASE))
    blocks = jnp.where(blocks, lax.div(keys + (r.block - 1), jnp.int32(r.block)), 0)
    head = r.first_head + pass_head
    words = (blocks, r.tile_W8[slot, POSITION], row, r.tile_W8[slot, FIRST_LIVE], r.tile_W8[slot, END_LIVE], head)
    place = lax.rem(turn, jnp.int32(_TAKEN))
    for word, value in enumerate(words):
        r.item_4W[place, word] = value
    plgpu.barrier_arrive(r.item_full.at[place])
    return blocks, row, head, chunk, pass_head * r.sizes_4[1] + base


def _word(r: SimpleNamespace, turn: jax.Array, word: int) -> jax.Array:
    return r.item_4W[lax.rem(turn, jnp.int32(_TAKEN)), word]


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: queries, keys and values, `stages` key blocks ahead."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    stages, pages = r.stages, r.block // PAGE_TOKENS

    def places(chunk: jax.Array, block: jax.Array | int) -> tuple[jax.Array, ...]:
        # The last block may reach past the request's pages, where entries may be anything.
        indices = [jnp.minimum(block * pages + i, r.table_RM.shape[1] - 1) for i in range(pages)]
        return tuple(jnp.clip(r.table_RM[chunk, i], 0, r.latent_PKL.shape[0] - 1) for i in indices)

    def known(turn: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
        item = _announce(r, turn, index)
        return *item, *places(item[3], 0)

    def one_item(state: tuple[Any, ...]) -> tuple[Any, ...]:
        turn, done, (blocks, row, head, chunk, first_row, *first_places) = state

        def queries() -> None:
            for side in range(2):
                pl.when(turn > 0)(lambda side=side: plgpu.barrier_wait(r.q_free.at[side]))
                for i in range(r.head_dim // COLUMNS):
                    part = r.q_THE.at[pl.ds(row + side * ROWS, ROWS), head, pl.ds(i * COLUMNS, COLUMNS)]
                    plgpu.copy_gmem_to_smem(part, r.q_any_2XJC.at[side, i], r.q_full.at[side])

        def fetch(block: jax.Array | int, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = places(chunk, block + 1)  # read before the waits, which then hide its latency
            stage = lax.rem(done + block, jnp.int32(stages))
            reused = done + block >= stages
            rows = pl.ds(pl.multiple_of(first_row + block * r.block, r.block), r.block)
            pl.when(reused)(lambda: plgpu.barrier_wait(r.k_free.at[stage]))
            plgpu.copy_gmem_to_smem(r.key_ZN.at[rows], r.k_SLN.at[stage], r.k_full.at[stage])
            for i, page in enumerate(now):
                part = r.latent_PKL.at[page, :, pl.ds(r.rope_at, COLUMNS)]
                place = r.rope_SLC.at[stage, pl.ds(i * PAGE_TOKENS, PAGE_TOKENS)]
                plgpu.copy_gmem_to_smem(part, place, r.k_full.at[stage])
            if isinstance(block, int):
                queries()
            pl.when(reused)(lambda: plgpu.barrier_wait(r.v_free.at[stage]))
            plgpu.copy_gmem_to_smem(r.value_ZV.at[rows], r.v_SLV.at[stage], r.v_full.at[stage])
            return following

        # The next item is taken late, so that a long one does not hold another back, and looked up while the ring is
        # full: three trips to memory, one after the other.
        late = jnp.maximum(blocks - 1, 1)
        following = lax.fori_loop(1, late, fetch, fetch(0, tuple(first_places)))
        after = known(turn + 1, _take(r, turn + 1))
        lax.fori_loop(late, blocks, fetch, following)
        return turn + 1, done + blocks, after

    state = (jnp.int32(0), jnp.int32(0), known(jnp.int32(0), r.cta))
    _, done, _ = lax.while_loop(lambda state: state[2][0] > 0, one_item, state)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(done - stages, 0), done)
    def _(block: jax.Array) -> None:
        stage = lax.rem(block, jnp.int32(stages))
        plgpu.barrier_wait(r.k_free.at[stage])
        plgpu.barrier_wait(r.v_free.at[stage])

    @pl.when(done > 0)
    def _() -> None:
        for side in range(2):
            plgpu.barrier_wait(r.q_free.at[side])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of each item over all key blocks, then their way out."""
    if r.native:
        plgpu.set_max_registers(r.tuning.compute_registers, action="increase")
    first = jnp.int32(0)
    plgpu.barrier_wait(r.item_full.at[first])
    blocks = _word(r, first, _BLOCKS)

    @pl.when(blocks > 0)
    def _() -> None:
        # The second warpgroup gives the first one its first turn.
        if r.native and r.tuning.turns:
            pl.when(side == 1)(lambda: _named("bar.arrive 8, 256;"))
        _await_first(r, side, first)

        def scores(out: Any) -> jax.Array:
            _my_turn(r, side)
            _scores(r, side, first, out)
            _your_turn(r, side)
            return out[...]

        score_JL = pl.run_scoped(scores, plgpu.ACC((ROWS, r.block), jnp.float32))
        _free_keys(r, side, first, blocks == 1)
        state = (first, blocks, first, *_first_softmax(r, side, first, score_JL))
        lax.while_loop(lambda state: state[1] > 0, lambda state: _one_item(r, side, *state), state)
        # One turn is left over.
        if r.native and r.tuning.turns:
            pl.when(side == 0)(lambda: _named("bar.sync 8, 256;"))

    # What has been issued must have left shared memory when the CTA ends.
    plgpu.wait_smem_to_gmem(0)
    pl.when((side == 0) & (r.pass_1[0] == 0))(lambda: _zero_gaps(r))


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
    position = _word(r, turn, _POSITION) + side * ROWS
    acc_JV = plgpu.layout_cast(jnp.zeros((ROWS, r.value_dim), jnp.float32), TILE)

    def step(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc_JV, weight_JL, max_J, sum_J = state
        count = done + block
        stage = lax.rem(count, jnp.int32(r.stages))
        next_stage = lax.rem(count + 1, jnp.int32(r.stages))
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
    plgpu.barrier_wait(r.item_full.at[lax.rem(turn + 1, jnp.int32(_TAKEN))])
    next_blocks = _word(r, turn + 1, _BLOCKS)
    more = next_blocks > 0
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


def _scores(r: SimpleNamespace, side: jax.Array, stage: jax.Array, out: Any) -> None:
    for i in range(r.nope_dim // COLUMNS):
        keys = r.k_SLN.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)]
        plgpu.wgmma(out, r.q_2XJC.at[side, i], keys.T)
    plgpu.wgmma(out, r.q_2XJC.at[side, r.nope_dim // COLUMNS], r.rope_SLC.at[stage].T)


def _pair(
    r: SimpleNamespace,
    side: jax.Array,
    stage: jax.Array,
    next_stage: jax.Array,
    weight_JL: jax.Array,
    acc_JV: jax.Array,
    await_keys: Callable[[], None],
) -> tuple[jax.Array, jax.Array]:
    """acc + weights V of one block, and the scores of the next."""
    plgpu.barrier_wait(r.v_full.at[stage])

    def native(out: Any) -> tuple[jax.Array, jax.Array]:
        def both(acc: Any) -> None:
            _my_turn(r, side)
            plgpu.wgmma(acc, weight_JL, r.v_SLV.at[stage])
            await_keys()
            _scores(r, side, next_stage, out)
            _your_turn(r, side)

        added = pl.run_state(both)(plgpu.ACC.init(acc_JV))
        return added, out[...]

    def interpreted(out: Any, acc: Any) -> tuple[jax.Array, jax.Array]:
        r.p_2JL.at[side][...] = weight_JL
        plgpu.commit_smem()
        plgpu.wgmma(acc, r.p_2JL.at[side], r.v_SLV.at[stage])
        await_keys()
        _scores(r, side, next_stage, out)
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
    position = _word(r, turn, _POSITION) + side * ROWS
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


def _named(text: str) -> None:
    """A named barrier of the hardware."""

    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)

    run()


def _my_turn(r: SimpleNamespace, side: jax.Array) -> None:
    if r.native and r.tuning.turns:
        pl.when(side == 0)(lambda: _named("bar.sync 8, 256;"))
        pl.when(side == 1)(lambda: _named("bar.sync 9, 256;"))


def _your_turn(r: SimpleNamespace, side: jax.Array) -> None:
    if r.native and r.tuning.turns:
        pl.when(side == 0)(lambda: _named("bar.arrive 9, 256;"))
        pl.when(side == 1)(lambda: _named("bar.arrive 8, 256;"))


def _store(r: SimpleNamespace, side: jax.Array, turn: jax.Array, out_JV: jax.Array) -> Callable[[int], None]:
    """Gives what writes 64 columns of the warpgroup's live rows: in one copy where all are live, else row by row."""
    first = side * ROWS
    row, head = _word(r, turn, _ROW_AT) + first, _word(r, turn, _HEAD)
    start = jnp.clip(_word(r, turn, _FIRST_LIVE) - first, 0, ROWS)
    end = jnp.clip(_word(r, turn, _END_LIVE) - first, 0, ROWS)
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

    @pl.loop(0, lax.div(r.gaps_Z.shape[0] - r.cta + (r.tuning.ctas - 1), jnp.int32(r.tuning.ctas)))
    def _(turn: jax.Array) -> None:
        block = turn * r.tuning.ctas + r.cta

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
