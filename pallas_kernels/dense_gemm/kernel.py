"""The Hopper kernel of dense_gemm in Pallas Mosaic GPU: one launch runs one product, or several in a row.

Weights lie on wgmma's M axis, tokens on N (padded to 8): Y^T = W X^T. Each stage (a product with its epilogue) is a
line of units, tile by tile and along K within a tile, that is cut into equal parts, one a CTA. A tile that is cut
belongs to the CTA with its beginning, which adds the others' fp32 parts in a fixed order. Two warpgroups compute. One
copies weights and never waits for results, so that the next stage's weights arrive while a stage ends. One copies
tokens, and waits for all CTAs between stages. NOTES.md has the design and figures.
Dimension keys beyond the contract's: R rows of tokens in shared memory, S slots of weights, Z slots of tokens, C
columns of a tile, L columns of a warpgroup, M halves of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_gemm.contract import Stage, X

TILE, HALF = 128, 64  # columns of a block of a tile, and of a warpgroup in it: wgmma's M
STEP = 64  # of the inner dimension: 128 bytes, the widest swizzle
ALIGN = 8  # rows of a swizzled tile of shared memory
_SWIZZLE = plgpu.SwizzleTransform(128)
_SWIZZLED = (plgpu.TilingTransform((ALIGN, STEP)), _SWIZZLE)
_TILE = plgpu.Layout.WGMMA
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED
_PER_TOKEN, _PER_COLUMN = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)
_SPLAT = plgpu.Layout.WG_SPLAT
_WEIGHTS, _TOKENS = 2, 3  # the warpgroups that copy
_SQUARES = 4 * 32 * 2  # what a sum over wgmma's M needs to cross warps
_SUMS_AT_ONCE = 64  # registers that partial results may take while they are read


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device and a number of tokens."""

    slots: int = 12  # of weights, 16 KB each
    token_slots: int = 12  # of tokens, R x 128 bytes each
    blocks: int = 1  # of a tile of a stage that is not gated, 128 columns each; gated ones have 2
    ctas: int = 132  # one an SM: all must run at once
    ahead: tuple[int, ...] = (4, 4)  # units of each of the next launch's weights that a CTA asks the L2 for
    compute_registers: int = 208
    copy_registers: int = 40


class _Line(NamedTuple):
    """A stage's units and this CTA's part of them."""

    steps: int  # of a tile
    units: int
    ctas: int
    first: jax.Array
    end: jax.Array


class _Part(NamedTuple):
    """What a CTA does of a tile: the steps from first to end."""

    number: int  # of the stage
    side: jax.Array  # the warpgroup's half of each block
    tile: jax.Array
    first: jax.Array
    end: jax.Array
    line: _Line


def sync_words(stages: int, tuning: Tuning) -> int:
    """Length of the int32 array of counters that a launch needs: zeros before, and again after."""
    return 2 * tuning.ctas * stages + 8


def padded(tokens: int) -> int:
    """R: up to a multiple of 8."""
    return -(-tokens // ALIGN) * ALIGN


def dense(
    stages: tuple[Stage, ...],
    arrays: dict[str, jax.Array],
    ahead: tuple[jax.Array, ...],
    sync: Any,
    out_TN: jax.Array | None = None,
    *,
    tuning: Tuning,
    only: int | None = None,
    interpret: Any = None,
) -> dict[str, jax.Array]:
    """The result of each stage, y0, y1, ... [T, N] in x's dtype, and what stages with a norm's weights leave beside it.

    arrays, ahead: as in the contract, weights [1 or 2, N, K]. sync: a reference to sync_words zeros. out_TN: the last
    stage's result is written over it. only: that stage alone, where `arrays` holds what earlier ones gave: in the
    interpreter CTAs run one after the other, and cannot wait for each other.
    """
    (T, _), dtype = arrays["x"].shape, arrays["x"].dtype
    rows, last = padded(T), len(stages) - 1
    blocks = [2 if stage.gated else tuning.blocks for stage in stages]
    adds = any(stage.residual is not None for stage in stages)
    exact = any(stage.exact for stage in stages)
    todo = range(len(stages)) if only is None else (only,)
    out_type = {}
    for i in todo:
        N = arrays[f"w{i}"].shape[1]
        if i < last or out_TN is None:
            out_type[f"y{i}"] = jax.ShapeDtypeStruct((T, N), jnp.float32 if stages[i].exact else dtype)
        if stages[i].normed:
            out_type[f"g{i}"] = jax.ShapeDtypeStruct((T, N), dtype)
            out_type[f"square{i}"] = jax.ShapeDtypeStruct((N // HALF, rows), jnp.float32)
        out_type[f"part{i}"] = jax.ShapeDtypeStruct((tuning.ctas, 2, blocks[i], HALF, rows), jnp.float32)
    inputs = arrays | {f"ahead{i}": one for i, one in enumerate(ahead)} | {"sync": sync}
    out_ref = None
    if out_TN is not None and last in todo:
        out_ref = inputs[f"y{last}"] = jax.new_ref(out_TN)
    names = [*inputs, *out_type]
    sizes = {"stages": stages, "todo": todo, "blocks": blocks, "tokens": T, "rows": rows, "tuning": tuning}
    sizes["meets"] = meetings(stages) if only is None else [False] * len(stages)
    sizes["native"] = interpret is None

    def dense_gemm(*refs: Any, **scratch: Any) -> None:
        r = SimpleNamespace(**scratch, **sizes, ref=dict(zip(names, refs, strict=True)))
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < _WEIGHTS)(lambda: _compute(r, warpgroup))
        pl.when(warpgroup == _WEIGHTS)(lambda: _copy_weights(r))
        pl.when(warpgroup == _TOKENS)(lambda: _copy_tokens(r))

    call = plgpu.kernel(
        dense_gemm,
        out_type=tuple(out_type.values()),
        scratch_types={
            "w_SCK": plgpu.SMEM((tuning.slots, TILE, STEP), dtype, transforms=_SWIZZLED),
            "x_ZRK": plgpu.SMEM((tuning.token_slots, rows, STEP), dtype, transforms=_SWIZZLED),
            "o_2RL": plgpu.SMEM((2, rows, HALF), dtype, transforms=(_SWIZZLE,)),
            "add_2RL": plgpu.SMEM((2, rows if adds else ALIGN, HALF), dtype, transforms=(_SWIZZLE,)),
            "exact_2RL": plgpu.SMEM((2, rows if exact else ALIGN, HALF), jnp.float32),
            "square_2": plgpu.SMEM((2, _SQUARES), jnp.float32),
            "w_full": plgpu.Barrier(num_barriers=tuning.slots),
            "w_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.slots),
            "x_full": plgpu.Barrier(num_barriers=tuning.token_slots),
            "x_free": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.token_slots),
            "added": plgpu.Barrier(num_barriers=2),
            "stage_done": plgpu.Barrier(num_arrivals=2),
            "opened": plgpu.Barrier(),
        },
        grid=(tuning.ctas,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0 if interpret is None else 2048,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    made = dict(zip(out_type, call(*inputs.values()), strict=True))
    if out_ref is not None:
        made[f"y{last}"] = jax.freeze(out_ref)
    return {name: one for name, one in made.items() if not name.startswith("part")}


def _cta(r: SimpleNamespace) -> jax.Array:
    """Number of this CTA. The interpreter runs one after the other; the owner of a cut tile must be the last."""
    cta = lax.axis_index("cta")
    return cta if r.native else r.tuning.ctas - 1 - cta


def _line(weights: Any, blocks: int, gated: bool, ctas: int, cta: jax.Array) -> _Line:
    _, N, K = weights.shape
    steps = K // STEP
    units = -(-N // (TILE if gated else TILE * blocks)) * steps
    ctas = min(ctas, units)

    def start(number: jax.Array) -> jax.Array:
        return lax.div(jnp.minimum(number, ctas) * units, jnp.int32(ctas))

    return _Line(steps, units, ctas, start(cta), start(cta + 1))


def _stage_line(r: SimpleNamespace, number: int) -> _Line:
    stage = r.stages[number]
    return _line(r.ref[f"w{number}"], r.blocks[number], stage.gated, r.tuning.ctas, _cta(r))


def meetings(stages: tuple[Stage, ...]) -> list[bool]:
    """Before which stages all CTAs meet: those that need what was made since they last met."""
    found, since = [], 0
    for number, stage in enumerate(stages):
        needs = max(stage.source, X if stage.residual is None else stage.residual)
        found.append(needs >= since)
        if found[-1]:
            since = number
    return found


def _box(weights: Any, gated: bool, blocks: int, block: int, tile: jax.Array, step: jax.Array) -> Any:
    """The part of the weights that goes to a slot. Past the last column there are zeros."""
    column = (tile if gated else tile * blocks + block) * TILE
    return weights.at[block if gated else 0, pl.ds(column, TILE), pl.ds(step * STEP, STEP)]


def _copy_weights(r: SimpleNamespace) -> None:
    """A copying warpgroup: weights of all stages, as many slots ahead as there are."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    slots, used = r.tuning.slots, jnp.int32(0)
    for number in r.todo:
        gated = r.stages[number].gated
        line, blocks, weights = _stage_line(r, number), r.blocks[number], r.ref[f"w{number}"]

        @pl.loop(line.first, line.end)
        def _(
            unit: jax.Array,
            used: jax.Array = used,
            line: _Line = line,
            blocks: int = blocks,
            gated: bool = gated,
            weights: Any = weights,
        ) -> None:
            tile, step = lax.div(unit, jnp.int32(line.steps)), lax.rem(unit, jnp.int32(line.steps))
            for block in range(blocks):
                count = used + (unit - line.first) * blocks + block
                slot = lax.rem(count, jnp.int32(slots))
                pl.when(count >= slots)(lambda slot=slot: plgpu.barrier_wait(r.w_free.at[slot]))
                source = _box(weights, gated, blocks, block, tile, step)
                plgpu.copy_gmem_to_smem(source, r.w_SCK.at[slot], r.w_full.at[slot])

        used = used + (line.end - line.first) * blocks
    for index, units in enumerate(r.tuning.ahead):
        if f"ahead{index}" in r.ref:
            _ask_ahead(r, r.ref[f"ahead{index}"], units)
    _drain(r.w_free, slots, used)


def _ask_ahead(r: SimpleNamespace, weights: Any, units: int) -> None:
    """Has the L2 read the first units that this CTA will need in the next launch."""
    gated = weights.shape[0] == 2
    blocks = 2 if gated else r.tuning.blocks
    line = _line(weights, blocks, gated, r.tuning.ctas, _cta(r))

    @pl.loop(line.first, jnp.minimum(line.end, line.first + units))
    def _(unit: jax.Array) -> None:
        tile, step = lax.div(unit, jnp.int32(line.steps)), lax.rem(unit, jnp.int32(line.steps))
        for block in range(blocks):
            plgpu.async_prefetch(_box(weights, gated, blocks, block, tile, step))


def _drain(free: Any, slots: int, used: jax.Array) -> None:
    """Every completion of a barrier must have been waited for when a kernel ends."""

    @pl.loop(jnp.maximum(used - slots, 0), used)
    def _(count: jax.Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(count, jnp.int32(slots))])


def _copy_tokens(r: SimpleNamespace) -> None:
    """The other copying warpgroup: tokens. Before a stage that needs earlier ones it waits for all CTAs."""
    if r.native:
        plgpu.set_max_registers(r.tuning.copy_registers, action="decrease")
    slots, used = r.tuning.token_slots, jnp.int32(0)
    for number in r.todo:
        stage = r.stages[number]
        line = _stage_line(r, number)
        if stage.source == X:
            tokens = r.ref["x"]
        else:
            tokens = r.ref[f"y{stage.source}" if stage.norm_eps is None else f"g{stage.source}"]
        if r.meets[number]:
            plgpu.barrier_wait(r.stage_done)
            _wait_for_all(r)
            # Once a meeting, not a stage: of two arrivals in a row the computing warpgroups would never see the first.
            plgpu.barrier_arrive(r.opened)

        def fetch(unit: jax.Array, used: jax.Array = used, line: _Line = line, tokens: Any = tokens) -> None:
            count = used + unit - line.first
            slot = lax.rem(count, jnp.int32(slots))
            pl.when(count >= slots)(lambda: plgpu.barrier_wait(r.x_free.at[slot]))
            step = lax.rem(unit, jnp.int32(line.steps))
            zero = lax.min(unit, jnp.int32(0))  # not a constant: there are fewer rows, and the others become zeros
            source = tokens.at[pl.ds(zero, r.rows), pl.ds(step * STEP, STEP)]
            plgpu.copy_gmem_to_smem(source, r.x_ZRK.at[slot], r.x_full.at[slot])

        pl.loop(line.first, line.end)(fetch)
        used = used + line.end - line.first
    _drain(r.x_free, slots, used)


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 columns of each block of each tile."""
    if r.native:
        plgpu.set_max_registers(r.tuning.compute_registers, action="increase")
    hands_over = [*r.meets[1:], False]
    weights_used = tokens_used = jnp.int32(0)
    for number in r.todo:
        stage = r.stages[number]
        line, blocks = _stage_line(r, number), r.blocks[number]
        first_tile = lax.div(line.first, jnp.int32(line.steps))
        end_tile = lax.div(line.end + (line.steps - 1), jnp.int32(line.steps))

        if r.meets[number]:
            plgpu.barrier_wait(r.opened)
        scale_R = None if stage.norm_eps is None else _scale(r, stage)

        def visit(
            tile: jax.Array,
            number: int = number,
            line: _Line = line,
            scale_R: jax.Array | None = scale_R,
            used: tuple[jax.Array, jax.Array] = (weights_used, tokens_used),
        ) -> None:
            part = _Part(
                number,
                side,
                tile,
                jnp.maximum(line.first - tile * line.steps, 0),
                jnp.minimum(line.end - tile * line.steps, line.steps),
                line,
            )
            _fetch_residual(r, part)
            sums = _products(r, part, used)
            pl.when(part.first > 0)(lambda: _hand_in(r, part, sums))
            pl.when(part.first == 0)(lambda: _finish(r, part, sums, scale_R))

        pl.loop(first_tile, jnp.where(line.end > line.first, end_tile, first_tile))(visit)
        weights_used = weights_used + (line.end - line.first) * blocks
        tokens_used = tokens_used + (line.end - line.first)
        if hands_over[number]:
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(r.stage_done)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scale(r: SimpleNamespace, stage: Stage) -> jax.Array:
    """1 / rms of each token of a stage's source: [R]."""
    square_MR = r.ref[f"square{stage.source}"]
    count = square_MR.shape[0]
    width = max(1, min(16, _SUMS_AT_ONCE * 4 // r.rows))

    def add(index: jax.Array, total_R: jax.Array) -> jax.Array:
        places = [index * width + i for i in range(width)]
        read = [square_MR.at[jnp.minimum(place, count - 1)] for place in places]
        values = [plgpu.load(one, layout=_PER_TOKEN, optimized=False) for one in read]
        for place, value in zip(places, values, strict=True):
            total_R += value * (place < count).astype(jnp.float32)
        return total_R

    zero_R = plgpu.layout_cast(jnp.zeros((r.rows,), jnp.float32), _PER_TOKEN)
    total_R = lax.fori_loop(0, -(-count // width), add, zero_R)
    return lax.rsqrt(total_R / (count * HALF) + stage.norm_eps)


def _products(r: SimpleNamespace, part: _Part, used: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
    """One fp32 [64, R] a block. Each step's slots are given back while the next step runs."""
    blocks, line = r.blocks[part.number], part.line
    mine = pl.ds(part.side * HALF, HALF)

    def multiply(*accs: Any) -> list[jax.Array]:
        def places(step: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            done = part.tile * line.steps + step - line.first
            w_slots = [lax.rem(used[0] + done * blocks + i, jnp.int32(r.tuning.slots)) for i in range(blocks)]
            return lax.rem(used[1] + done, jnp.int32(r.tuning.token_slots)), w_slots

        def give_back(step: jax.Array) -> None:
            x_slot, w_slots = places(step)
            plgpu.barrier_arrive(r.x_free.at[x_slot])
            for slot in w_slots:
                plgpu.barrier_arrive(r.w_free.at[slot])

        @pl.loop(part.first, part.end)
        def _(step: jax.Array) -> None:
            x_slot, w_slots = places(step)
            plgpu.barrier_wait(r.x_full.at[x_slot])
            for slot, acc in zip(w_slots, accs, strict=True):
                plgpu.barrier_wait(r.w_full.at[slot])
                plgpu.wgmma(acc, r.w_SCK.at[slot, mine], r.x_ZRK.at[x_slot].T)
            plgpu.wgmma_wait(blocks)
            pl.when(step > part.first)(lambda: give_back(step - 1))

        plgpu.wgmma_wait(0)
        give_back(part.end - 1)
        return [acc[...] for acc in accs]

    return pl.run_scoped(multiply, *[plgpu.ACC((HALF, r.rows), jnp.float32)] * blocks)


def _hand_in(r: SimpleNamespace, part: _Part, sums: list[jax.Array]) -> None:
    """Leaves this CTA's part of a tile to the CTA that has the tile's beginning."""
    number, side, line = part.number, part.side, part.line
    for block, value in enumerate(sums):
        r.ref[f"part{number}"].at[_cta(r), side, block][...] = value
    # The CTA with unit u is the last one whose first unit is not after u.
    owner = lax.div((part.tile * line.steps + 1) * line.ctas - 1, jnp.int32(line.units))
    _signal(r.ref["sync"].at[pl.ds(_counter(r, number, owner, side), 1)])


def _counter(r: SimpleNamespace, number: int, cta: jax.Array, side: jax.Array) -> jax.Array:
    return 8 + 2 * (number * r.tuning.ctas + cta) + side


def _finish(r: SimpleNamespace, part: _Part, sums: list[jax.Array], scale_R: jax.Array | None) -> None:
    """Adds what other CTAs have of this tile, in the order of K, then the epilogue."""
    number, side, line = part.number, part.side, part.line
    last = lax.div((part.tile + 1) * line.steps * line.ctas - 1, jnp.int32(line.units))
    others = last - _cta(r)
    wanted = jnp.where(others > 0, others, 0)
    pl.when(others > 0)(lambda: _wait(r.ref["sync"].at[pl.ds(_counter(r, number, _cta(r), side), 1)], others))
    width = max(1, min(8, _SUMS_AT_ONCE * 2 // (len(sums) * r.rows)))

    def add(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        sums = list(sums)
        values = []
        for i in range(width):
            place = jnp.minimum(_cta(r) + 1 + index * width + i, last)
            values.append(
                [
                    plgpu.load(r.ref[f"part{number}"].at[place, side, block], layout=_TILE, optimized=False)
                    for block in range(len(sums))
                ]
            )
        for i, parts in enumerate(values):
            # Past the last one it is read again, and then counts nothing.
            counts = (index * width + i < wanted).astype(jnp.float32)
            sums = [one + value * counts for one, value in zip(sums, parts, strict=True)]
        return sums

    sums = lax.fori_loop(0, lax.div(wanted + (width - 1), jnp.int32(width)), add, list(sums))
    _epilogue(r, part, sums, scale_R)


def _columns(r: SimpleNamespace, part: _Part, block: int) -> jax.Array:
    """First column of this warpgroup in a block of the result."""
    blocks = 1 if r.stages[part.number].gated else r.blocks[part.number]
    return (part.tile * blocks + block) * TILE + part.side * HALF


def _fetch_residual(r: SimpleNamespace, part: _Part, block: int = 0) -> None:
    """Starts the copy of what is added to a block of a tile that this CTA finishes."""
    residual = r.stages[part.number].residual
    if residual is None:
        return
    source = r.ref[f"residual{part.number}" if residual == X else f"y{residual}"]
    column = _columns(r, part, block)

    @pl.when((part.first == 0) & (column < source.shape[1]))
    def _() -> None:
        rows = pl.ds(lax.min(column, jnp.int32(0)), r.rows)
        plgpu.copy_gmem_to_smem(source.at[rows, pl.ds(column, HALF)], r.add_2RL.at[part.side], r.added.at[part.side])


def _epilogue(r: SimpleNamespace, part: _Part, sums: list[jax.Array], scale_R: jax.Array | None) -> None:
    number, stage, side = part.number, r.stages[part.number], part.side
    if scale_R is not None:
        sums = [one * lax.broadcast_in_dim(scale_R, one.shape, [1]) for one in sums]
    if stage.gated:
        gate, up = sums
        sums = [gate / (1.0 + jnp.exp(-gate)) * up]
    N = r.ref[f"y{number}"].shape[1]
    for block, value in enumerate(sums):
        column = _columns(r, part, block)

        def finish(block: int = block, value: jax.Array = value, column: jax.Array = column) -> None:
            if stage.bias:
                value = value + _per_column(r.ref[f"bias{number}"], column, value.shape)
            if stage.residual is not None:
                if block:
                    _fetch_residual(r, part, block)
                plgpu.barrier_wait(r.added.at[side])
                added = plgpu.load(r.add_2RL.at[side].T, layout=_TURNED, optimized=False)
                value = value + plgpu.layout_cast(added, _TILE).astype(jnp.float32)
            if stage.exact:
                _store(r.exact_2RL.at[side], value, r.ref[f"y{number}"], column)
                return
            value = value.astype(r.o_2RL.dtype)
            _store(r.o_2RL.at[side], value, r.ref[f"y{number}"], column)
            if stage.normed:
                value32 = value.astype(jnp.float32)
                r.ref[f"square{number}"].at[lax.div(column, jnp.int32(HALF))][...] = _sum_over_columns(
                    r, side, value32 * value32
                )
                weighted = value32 * _per_column(r.ref[f"norm{number}"], column, value.shape)
                _store(r.o_2RL.at[side], weighted.astype(value.dtype), r.ref[f"g{number}"], column)

        pl.when(column < N)(finish)


def _sum_over_columns(r: SimpleNamespace, side: jax.Array, value_LR: jax.Array) -> jax.Array:
    """[R]. The usual sum crosses warps through a place that both warpgroups share, where they would race."""
    if not r.native:
        return value_LR.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(_TILE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((r.rows,), jnp.float32, layout=_PER_TOKEN),
    )
    def add(_: Any, value: Any, own: Any) -> Any:
        return value.reduce("add", 0, own)

    return add(value_LR, r.square_2.at[side])


def _per_column(source_N: Any, column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    value_L = plgpu.load(source_N.at[pl.ds(column, HALF)], layout=_PER_COLUMN, optimized=False)
    return lax.broadcast_in_dim(value_L.astype(jnp.float32), shape, [0])


def _store(stage_RL: Any, value_LR: jax.Array, target_TN: Any, column: jax.Array) -> None:
    """Transposes a warpgroup's part through shared memory and writes the rows of tokens."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stage_RL.T[...] = plgpu.layout_cast(value_LR, _TURNED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage_RL.at[pl.ds(0, target_TN.shape[0])], target_TN.at[:, pl.ds(column, HALF)])


def _signal(counter: Any) -> None:
    """Adds 1 to a counter in memory when all that this warpgroup wrote can be seen by who waits for it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_: Any, counter: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    signal(counter)


def _wait(counter: Any, value: jax.Array) -> None:
    """Waits until a counter in memory is `value`, and makes it 0 again."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT))
    def wait(_: Any, counter: Any, value: Any) -> None:
        pointer = mgpu.utils.memref_ptr(counter)
        mgpu.utils.SemaphoreRef(pointer).wait(value.registers.item(), memory_scope="gpu")

    wait(counter, value)


def _wait_for_all(r: SimpleNamespace) -> None:
    """Waits until each CTA is here; what they wrote, by copies too, can then be read, by copies too.

    One word counts: CTA 0 adds 2^31 - (CTAs - 1), the others 1, so that each time its highest bit turns and the others
    are 0 again, whatever it was before.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT))
    def meet(_: Any, counter: Any, mine: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.single_thread(mgpu.utils.ThreadSubset.WARPGROUP):
            mgpu.utils.inline_ptx(_MEET, mgpu.utils.memref_ptr(counter), mine.registers.item(), has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    mine = jnp.where(_cta(r) == 0, jnp.int32(2**31 - (r.tuning.ctas - 1)), jnp.int32(1))
    meet(r.ref["sync"].at[pl.ds(0, 1)], mine)


_MEET = """{
    .reg .b32 before, now;
    .reg .pred same;
    fence.proxy.async;
    atom.add.acq_rel.gpu.global.u32 before, [$0], $1;
again:
    ld.acquire.gpu.global.u32 now, [$0];
    xor.b32 now, now, before;
    setp.ge.s32 same, now, 0;
    @same bra again;
    fence.proxy.async;
}"""
