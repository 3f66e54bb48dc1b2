"""How persistent CTAs share items out among themselves, and what the warpgroups of one tell each other of an item.

The copying warpgroup takes an item, looks it up and leaves its words in shared memory; the computing ones read them
there, as a chain of reads from global memory takes them as long as a key block. The item after it is to be taken as
late as its lookup allows: who reserves one when a long one begins holds it back from those that are free earlier.
The next item's number is a word of global memory; the CTA that is through last takes it back to 0, so that layers may
share it and nobody fills it with zeros in between (grid_sync.py says why an input may be changed).
Users hand in `r`: cta, ctas, native, next_2 (int32 zeros: the next item's number, the CTAs that are through) and what
`scratch` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import grid_sync

BLOCKS, POSITION, ROW, FIRST_LIVE, END_LIVE, HEAD, KEYS = range(7)  # the words of an item
_KEPT = 4  # items whose words are kept: more than the warpgroups can be apart


def scratch() -> dict[str, Any]:
    """Shared memory and barriers."""
    return {
        "index_1": plgpu.SMEM((1,), jnp.int32),
        "item_4W": plgpu.SMEM((_KEPT, 8), jnp.int32),
        "item_full": plgpu.Barrier(num_barriers=_KEPT),
    }


def take(r: SimpleNamespace, turn: jax.Array) -> jax.Array:
    """The item of the CTA's turn, 1 or later: the next one that no CTA has. It may lie past the last."""
    if not r.native:  # the interpreter has no atomics: shares in turn
        return r.cta + turn * r.ctas

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def next_item(_: Any, counter: Any, place: Any) -> None:
        text = "{.reg .u32 t; atom.relaxed.gpu.global.add.u32 t, [$0], 1; add.u32 t, t, $2; st.shared.u32 [$1], t;}"
        with mgpu_utils.single_thread(mgpu_utils.ThreadSubset.WARPGROUP):
            pointers = [mgpu_utils.memref_ptr(counter), mgpu_utils.memref_ptr(place)]
            first = mgpu_utils.c(r.ctas, ir.IntegerType.get_signless(32))
            void = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, [*pointers, first], text, "l,r,r", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()

    typed: Any = next_item  # the decorator's result takes no context
    typed(r.next_2, r.index_1)
    return r.index_1[0]


def close(r: SimpleNamespace) -> None:
    """The copying warpgroup, when it takes nothing any more."""
    if r.native:

        @pl.when(grid_sync.last_to_arrive(r.next_2.at[1], r.ctas))
        def _() -> None:
            r.next_2[0] = jnp.int32(0)


def publish(r: SimpleNamespace, turn: jax.Array, words: Sequence[jax.Array]) -> None:
    """Leaves the words of the item of a turn, in the order of this module's numbers; 0 blocks where there is none."""
    place = lax.rem(turn, jnp.int32(_KEPT))
    for word, value in enumerate(words):
        r.item_4W[place, word] = value
    plgpu.barrier_arrive(r.item_full.at[place])


def await_item(r: SimpleNamespace, turn: jax.Array) -> None:
    """Each computing warpgroup, once a turn."""
    plgpu.barrier_wait(r.item_full.at[lax.rem(turn, jnp.int32(_KEPT))])


def word(r: SimpleNamespace, turn: jax.Array, which: int) -> jax.Array:
    """A word of an item that has been awaited and is not two turns old."""
    return r.item_4W[lax.rem(turn, jnp.int32(_KEPT)), which]
