"""The merge by the CTAs that computed: takes partial results of one row or unit, gives each of its parts a slice.

All parts of a row meet (grid_sync.arrive_and_wait), then each merges some heads or pieces of heads. Items are added in
their order, so that results do not depend on who comes when. A warpgroup reads a piece of an item's head at once, 4 to
16 bytes a thread.
Dimension keys: I items of all rows, H heads (with their query tokens), R columns of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN

# A head's running result, its largest sum so far, and the total weight.
State = tuple[jax.Array, jax.Array, jax.Array]
_Place = tuple[jax.Array, jax.Array]  # a head and a piece of it


@dataclass(frozen=True, slots=True)
class Form:
    """How rows of up to `items` items are merged: what one warpgroup loads at once.

    columns: of a piece of a head, 128, 256 or 512.
    """

    items: int
    items_at_once: int
    heads_at_once: int
    columns: int

    @property
    def layout(self) -> Any:
        """A thread has neighbouring columns."""
        return plgpu.Layout.WG_STRIDED((self.columns,), vec_size=self.columns // 128)


def merge_slice(
    part_IHR: jax.Ref,
    lse_IH: jax.Ref,
    store: Callable[[jax.Array, Any, jax.Array], None],
    *,
    heads: int,
    first: jax.Array,
    items: jax.Array,
    turn: Any,
    turns: Any,
    forms: tuple[Form, ...],
) -> None:
    """Merges the turn-th of `turns` slices of items first .. first + items - 1, each weighted by its base-2 sum.

    Args:
      part_IHR: fp32 partial results, each divided by its own sum of weights. lse_IH: fp32, log2 of these sums, with the
        maximum in it. Both of global memory; heads beyond `heads` are not read.
      store: store(head, columns, value) writes fp32 merged columns, a slice of a head, to where they belong.
      items: 2 at least. turn, turns: int32, below `turns` of one unit each.
      forms: in the order of their `items`, the last of them for any number.
    """
    narrower = 1
    for form in forms:
        fits = (items > narrower) & (items <= form.items)

        @pl.when(fits)
        def _(form: Form = form) -> None:
            merge_heads = functools.partial(_merge_heads, part_IHR, lse_IH, first, items, form=form)
            _merge_slice(merge_heads, store, heads, part_IHR.shape[2], turn, turns, form)

        narrower = form.items


def _merge_slice(
    merge_heads: Callable[[list[_Place]], list[jax.Array]],
    store: Callable[[jax.Array, Any, jax.Array], None],
    heads: int,
    width: int,
    turn: Any,
    turns: Any,
    form: Form,
) -> None:
    pieces = width // form.columns
    total = heads * pieces
    at_once = form.heads_at_once
    rounds = lax.div(total - turn + turns * at_once - 1, turns * at_once)

    def some(index: jax.Array, _: None) -> None:
        places = [turn + (index * at_once + i) * turns for i in range(at_once)]
        # Past the last one it is read again, and not stored.
        safe = [jnp.minimum(place, total - 1) for place in places]
        where = [(lax.div(place, jnp.int32(pieces)), lax.rem(place, jnp.int32(pieces))) for place in safe]
        merged = merge_heads(where)
        for place, (head, piece), value in zip(places, where, merged, strict=True):
            columns = _columns(piece, form)
            pl.when(place < total)(lambda head=head, columns=columns, value=value: store(head, columns, value))

    lax.fori_loop(0, rounds, some, None)


def _merge_heads(
    part_IHR: jax.Ref,
    lse_IH: jax.Ref,
    first: jax.Array,
    items: jax.Array,
    where: list[_Place],
    form: Form,
) -> list[jax.Array]:
    """The merged columns of some heads, fp32."""

    def group(index: jax.Array, states: tuple[State, ...]) -> tuple[State, ...]:
        places = [index * form.items_at_once + i for i in range(form.items_at_once)]
        # Past the last item it is read again, and then weighs nothing.
        read = [first + jnp.minimum(place, items - 1) for place in places]
        loaded = [
            [plgpu.load(part_IHR.at[i, head, _columns(piece, form)], layout=form.layout) for i in read]
            for head, piece in where
        ]
        sums = [
            [jnp.where(place < items, lse_IH[i, head], _NEVER) for place, i in zip(places, read, strict=True)]
            for head, _ in where
        ]
        return tuple(map(add_items, states, loaded, sums))

    zero = plgpu.layout_cast(jnp.zeros((form.columns,), jnp.float32), form.layout)
    states = ((zero, jnp.float32(_NEVER), jnp.float32(0.0)),) * len(where)
    rounds = lax.div(items + (form.items_at_once - 1), jnp.int32(form.items_at_once))
    states = lax.fori_loop(0, rounds, group, states)
    return [acc / total for acc, _, total in states]


def add_items(state: State, values: list[jax.Array], sums: list[jax.Array]) -> State:
    """A head's state with some items added: fp32 values, each divided by its sum of weights, and base-2 sums."""
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
