"""What the kernels of mla_decode share: sizes, what may be tuned, and the walk over a part's items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.split import unit_pages

PAGE_TOKENS = 64
RANK, LATENT_DIM = 512, 576  # the one geometry of all models: 512 latent dimensions and 64 of the rotated key
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILE = plgpu.Layout.WGMMA
NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    parts: int = 132  # into which the pages of all rows are cut: the SMs, for each block of heads
    min_pages: int = 2  # of a part
    slots: int = 7  # few heads: thirds of a page that shared memory holds
    fused: bool = True  # few heads: the parts of a row merge it without a second kernel
    multicast: bool = False  # many queries: two blocks of a row are a cluster, each copies half of a page to both
    merge_items: tuple[int, ...] = (4, 16)  # whose loads the merge keeps in flight, by how many there are
    merge_heads: int = 1  # that a CTA of the merge takes


def constant(value: float, shape: tuple[int, ...], layout: plgpu.Layout) -> jax.Array:
    """fp32 registers of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def for_each_item(r: SimpleNamespace, visit: Callable[..., None]) -> tuple[jax.Array, jax.Array]:
    """visit(index of the item in this part, row, first page, end page, pages before it) for each item of the part.

    Returns the number of items and of pages of the part.
    """
    part = lax.axis_index("part")
    first, last = r.first_unit_A[part], r.last_unit_A[part]

    def item(row: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        items, pages = done
        start = jnp.where(row == first, r.first_page_A[part], 0)
        end = jnp.where(row == last, r.end_page_A[part], unit_pages(r.length_B[row], PAGE_TOKENS))
        visit(items, row, start, end, pages)
        return items + 1, pages + end - start

    return lax.fori_loop(first, last + 1, item, (jnp.int32(0), jnp.int32(0)))


def is_whole(start: jax.Array, end: jax.Array, length_tokens: jax.Array) -> jax.Array:
    """True where an item is all of its row: its result goes to the output, not to the partial results."""
    return (start == 0) & (end == unit_pages(length_tokens, PAGE_TOKENS))


def for_each_page(
    r: SimpleNamespace, row: jax.Array, start: jax.Array, end: jax.Array, visit: Callable[[jax.Array, jax.Array], None]
) -> None:
    """visit(index of the page in its row, page id) for the pages of an item, in the copying warpgroup."""
    last_page = r.latent_PKL.shape[0] - 1

    def page(index: jax.Array, page_id: jax.Array) -> jax.Array:
        # The next id is read before this page waits for its place: its latency hides behind the wait.
        next_id = r.table_BM[row, jnp.minimum(index + 1, end - 1)]
        visit(index, jnp.clip(page_id, 0, last_page))  # an empty row's entry may be anything
        return next_id

    lax.fori_loop(start, end, page, r.table_BM[row, start])


def accumulate(add: Any, accs: tuple[jax.Array, ...], *, carried: bool) -> tuple[jax.Array, ...]:
    """The accumulators after `add` has issued its products on them.

    carried: the accumulators themselves are added to, which the interpreter cannot do, and without which a GPU spills.
    """
    if carried:
        return pl.run_state(add)(tuple(plgpu.ACC.init(acc) for acc in accs))

    def scoped(*outs: Any) -> tuple[jax.Array, ...]:
        add(outs)
        return tuple(out[...] for out in outs)

    added = pl.run_scoped(scoped, *(plgpu.ACC(acc.shape, jnp.float32) for acc in accs))
    return tuple(acc + new for acc, new in zip(accs, added, strict=True))
