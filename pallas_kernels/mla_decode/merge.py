"""Puts the rows together that were cut into items: takes partial results, writes the output in place.

A CTA takes a few heads of one row; items are read as whole rows of 512 fp32, 16 bytes a thread, many in flight.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.merge_slices import State, add_items
from pallas_kernels.mla_decode.common import NEVER, RANK, Tuning
from pallas_kernels.split import Split

_ROW = plgpu.Layout.WG_STRIDED((RANK,), vec_size=4)


def merge(
    out_BHR: jax.Array, part_IHR: jax.Array, lse_IH: jax.Array, split: Split, *, tuning: Tuning, interpret: Any = None
) -> jax.Array:
    """Writes into out_BHR, in place, each row of more than one item: its items weighted by their base-2 sums."""
    heads = out_BHR.shape[1]

    def mla_decode_merge(
        first_unit_A: Any, first_item_A: Any, items_A: Any, part_r: Any, lse_r: Any, out_r: Any
    ) -> None:
        part = lax.axis_index("part")
        first, count = first_item_A[part], items_A[part]

        def group(head: jax.Array, width: int, start: jax.Array, state: State) -> State:
            places = [start + i for i in range(width)]
            # Past the last item its own result is read again, and then weighs nothing.
            read = [first + jnp.minimum(place, count - 1) for place in places]
            values = [plgpu.load(part_r.at[i, head], layout=_ROW) for i in read]
            sums = [jnp.where(place < count, lse_r[i, head], NEVER) for place, i in zip(places, read, strict=True)]
            return add_items(state, values, sums)

        def merge_head(head: jax.Array, width: int) -> None:
            state = (plgpu.layout_cast(jnp.zeros((RANK,), jnp.float32), _ROW), jnp.float32(NEVER), jnp.float32(0.0))
            rounds = lax.div(count + (width - 1), jnp.int32(width))
            acc, _, total = lax.fori_loop(0, rounds, lambda i, state: group(head, width, i * width, state), state)
            out_r.at[first_unit_A[part], head][...] = (acc / total).astype(out_r.dtype)

        for offset in range(tuning.merge_heads):
            head = lax.axis_index("head") * tuning.merge_heads + offset
            # As many loads at once as there are items, about; the widest takes what is more, in rounds.
            narrower = 0
            for width in tuning.merge_items:
                fits = (count > narrower) & ((count <= width) | (width == tuning.merge_items[-1]))
                pl.when(fits & (head < heads))(functools.partial(merge_head, head, width))
                narrower = width

    call = plgpu.kernel(
        mla_decode_merge,
        grid=(tuning.parts, -(-heads // tuning.merge_heads)),
        grid_names=("part", "head"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out_ref = jax.new_ref(out_BHR)
    call(split.first_unit_A, split.first_item_A, split.items_A, part_IHR, lse_IH, out_ref)
    return jax.freeze(out_ref)
