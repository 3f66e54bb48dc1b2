"""The merge inside few_heads.py: takes partial results of a row that its parts have stored, writes the row's output.

All parts of a row meet, then each merges a slice. Items are added in their order, so that results do not depend on who
comes when. A warpgroup reads an item's head as one row of 512 fp32, 16 bytes a thread, or a quarter of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.common import NEVER

# A head's running result, its largest sum so far, and the total weight.
_State = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class Form:
    """How rows of up to `items` items are merged: what one warpgroup loads at once."""

    items: int
    items_at_once: int
    heads_at_once: int
    columns: int

    @property
    def layout(self) -> Any:
        """A thread has neighbouring columns."""
        return plgpu.Layout.WG_STRIDED((self.columns,), vec_size=self.columns // 128)


# 64 registers of loads in flight, or 33: latency is all that counts here.
FORMS = (Form(2, 2, 8, 512), Form(4, 4, 4, 512), Form(8, 8, 2, 512), Form(16, 16, 1, 512), Form(1 << 30, 33, 1, 128))


def merge_slice(
    r: SimpleNamespace,
    row: jax.Array,
    first: jax.Array,
    items: jax.Array,
    turn: Any,
    turns: Any,
    forms: tuple[Form, ...] = FORMS,
) -> None:
    """Merges items first .. first + items - 1 of a row into r.out_BHR: the turn-th of `turns` slices."""
    narrower = 1
    for form in forms:
        fits = (items > narrower) & (items <= form.items)
        pl.when(fits)(lambda form=form: _merge_slice(r, row, first, items, turn, turns, form))
        narrower = form.items


def _merge_slice(
    r: SimpleNamespace, row: jax.Array, first: jax.Array, items: jax.Array, turn: Any, turns: Any, form: Form
) -> None:
    pieces = r.out_BHR.shape[2] // form.columns
    total = r.out_BHR.shape[1] * pieces
    at_once = form.heads_at_once
    rounds = lax.div(total - turn + turns * at_once - 1, turns * at_once)

    def some(index: jax.Array, _: None) -> None:
        places = [turn + (index * at_once + i) * turns for i in range(at_once)]
        # Past the last one it is read again, and not stored.
        safe = [jnp.minimum(place, total - 1) for place in places]
        where = [(lax.div(place, jnp.int32(pieces)), lax.rem(place, jnp.int32(pieces))) for place in safe]
        merged = _merge_heads(r, first, items, where, form)
        for place, (head, piece), value in zip(places, where, merged, strict=True):

            @pl.when(place < total)
            def _(head: jax.Array = head, piece: jax.Array = piece, value: jax.Array = value) -> None:
                r.out_BHR.at[row, head, _columns(piece, form)][...] = value.astype(r.out_BHR.dtype)

    lax.fori_loop(0, rounds, some, None)


def _merge_heads(
    r: SimpleNamespace, first: jax.Array, items: jax.Array, where: list[tuple[jax.Array, jax.Array]], form: Form
) -> list[jax.Array]:
    """The merged columns of some heads, fp32."""

    def group(index: jax.Array, states: tuple[_State, ...]) -> tuple[_State, ...]:
        places = [index * form.items_at_once + i for i in range(form.items_at_once)]
        # Past the last item it is read again, and then weighs nothing.
        read = [first + jnp.minimum(place, items - 1) for place in places]
        loaded = [
            [plgpu.load(r.part_IHR.at[i, head, _columns(piece, form)], layout=form.layout) for i in read]
            for head, piece in where
        ]
        sums = [
            [jnp.where(place < items, r.lse_IH[i, head], NEVER) for place, i in zip(places, read, strict=True)]
            for head, _ in where
        ]
        return tuple(map(_add, states, loaded, sums))

    zero = plgpu.layout_cast(jnp.zeros((form.columns,), jnp.float32), form.layout)
    states = ((zero, jnp.float32(NEVER), jnp.float32(0.0)),) * len(where)
    rounds = lax.div(items + (form.items_at_once - 1), jnp.int32(form.items_at_once))
    states = lax.fori_loop(0, rounds, group, states)
    return [acc / total for acc, _, total in states]


def _add(state: _State, values: list[jax.Array], sums: list[jax.Array]) -> _State:
    acc, top, total = state
    new_top = top
    for one in sums:
        new_top = jnp.maximum(new_top, one)
    keep = jnp.exp2(top - new_top)
    acc, total = acc * keep, total * keep
    for value, one in zip(values, sums, strict=True):
        weight = jnp.exp2(one - new_top)
        acc, total = acc + value * weight, total + weight
    return acc, new_top, total


def _columns(piece: jax.Array, form: Form) -> Any:
    return pl.ds(piece * form.columns, form.columns)
