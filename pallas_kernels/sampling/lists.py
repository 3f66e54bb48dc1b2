"""Lists in shared memory that a warpgroup appends to: takes values and a mask in registers, gives compact lists.

Pallas has no scatter on this back end, so the append is written one level lower (`inline_mgpu`), thread by thread: each
warp votes, counts the votes below its lane and stores into a segment of its own. No atomics: where an element lands
depends on the row's own values only. The interpreter knows no inline code and runs the same append in plain JAX.

A list is [R, 128]: slot s of warp w lies in row s // 32, column 32 w + s % 32, so a segment holds 32 R elements.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

LANES = 128  # threads of a warpgroup
WARPS = 4
_WARP = 32
_EVERYONE = 0xFFFFFFFF


def strided(shape: tuple[int, ...], vec: int) -> Any:
    """The layout of an array whose threads hold `vec` neighbours each, one after the other."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=vec)


def listed(slot: jax.Array, warp: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of a slot of a warp."""
    return slot >> 5, _WARP * warp + (slot & (_WARP - 1))


def append(
    keep: jax.Array, columns: list[tuple[Any, jax.Array]], count_T: jax.Array, *, vec: int, interpreted: bool
) -> jax.Array:
    """Appends the elements whose `keep` is 1 to every list of `columns`; gives back the new number of each warp's.

    keep: int32, in layout strided(its shape, vec). columns: pairs of a list and of what goes into it, as `keep` is.
    count_T: int32 [128], the same in all threads of a warp. It goes on counting past a full segment, whose further
    elements are dropped.
    """
    if interpreted:
        return _append_in_jax(keep, columns, count_T, vec)
    layout, ref = strided(keep.shape, vec), plgpu.RefType()
    refs, arrays = zip(*columns, strict=True)

    inline = plgpu.inline_mgpu(
        arg_types=(layout, (ref,) * len(refs), (layout,) * len(refs), strided((LANES,), 1)),
        return_type=plgpu.ShapeDtypeStruct((LANES,), jnp.int32, layout=strided((LANES,), 1)),
    )
    emit = inline(lambda _, keep, refs, arrays, count_T: _emit_append(keep, refs, arrays, count_T, vec))
    return emit(keep, refs, arrays, count_T)


def _emit_append(keep: Any, refs: Any, arrays: Any, count_T: Any, vec: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    index = ir.IndexType.get()
    rows = ir.MemRefType(refs[0].type).shape[0]

    def number(value: int) -> ir.Value:
        return utils.c(value, i32)

    def at(register: ir.Value, place: int) -> ir.Value:
        return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))

    thread = arith.remui(utils.thread_idx(), number(LANES))
    lane = arith.andi(thread, number(_WARP - 1))
    first_column = arith.subi(thread, lane)
    below = arith.subi(arith.shli(number(1), lane), number(1))
    count = at(count_T.registers.item(), 0)
    for place, register in enumerate(keep.registers.flat):
        for element in range(vec):
            wanted = at(register, element)
            votes = utils.inline_ptx(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
                wanted,
                result_types=i32,
                has_side_effects=True,
                convergent=True,
            )
            slot = arith.addi(count, llvm.intr_ctpop(arith.andi(votes, below)))
            stored = arith.andi(
                arith.cmpi(arith.CmpIPredicate.ne, wanted, number(0)),
                arith.cmpi(arith.CmpIPredicate.ult, slot, number(rows * _WARP)),
            )
            with utils.when(stored):
                row = arith.index_cast(index, arith.shrui(slot, number(5)))
                column = arith.addi(first_column, arith.andi(slot, number(_WARP - 1)))
                for ref, array in zip(refs, arrays, strict=True):
                    memref.store(at(array.registers.flat[place], element), ref, [row, arith.index_cast(index, column)])
            count = arith.addi(count, llvm.intr_ctpop(votes))
    return mgpu.FragmentedArray.splat(count, (LANES,), strided((LANES,), 1).to_mgpu(), is_signed=True)


def _append_in_jax(keep: jax.Array, columns: list[tuple[Any, jax.Array]], count_T: jax.Array, vec: int) -> jax.Array:
    """The same append for the interpreter, element for element in the same order."""

    def by_warp(array: jax.Array) -> jax.Array:
        in_turn = array.reshape(-1, LANES, vec).transpose(0, 2, 1).reshape(-1, WARPS, _WARP)
        return in_turn.transpose(1, 0, 2).reshape(WARPS, -1)

    keep = by_warp(keep)
    before = count_T[::_WARP, None]
    slot = before + jnp.cumsum(keep, axis=1) - keep
    column = _WARP * jnp.arange(WARPS)[:, None] + slot % _WARP
    place = jnp.where(keep == 1, slot // _WARP * LANES + column, 2**31 - 1)
    for ref, array in columns:
        flat = ref[...].reshape(-1).at[place].set(by_warp(array), mode="drop")
        ref[...] = flat.reshape(ref.shape)
    return jnp.repeat((before + keep.sum(axis=1, keepdims=True))[:, 0], _WARP).astype(jnp.int32)
