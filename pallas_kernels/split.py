"""Cuts the pages of all rows into equal parts, one a CTA: takes lengths, gives the kernels their work list.

Rows and kv heads are laid end to end, unit u = row * N + head, each with its row's number of pages, and the line of
pages is cut every `quota` pages. A part may hold the end of one unit, whole units, and the start of another; each
piece of a unit that a part holds is an item. Walking the line, every item either enters the next part or the next
unit, so part + unit numbers the items without gaps in a unit: that is where an item's partial result lies.
Latent attention has one kv head: there a unit is a row. Dimension keys: A parts (CTAs, or groups of them), U units.

`split_pages` cuts the line where the load of all rows together wants it. `split_rows` cuts each row by its own length
alone, so that a row's result is the same to the bit whatever the others are; parts may then hold unlike amounts.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Where all units have one size, parts may hold so much more than an equal share (1/16) if no unit is then cut, or each
# into equal items: the stream is limited by memory, not by its CTAs, while what is cut must be merged.
_ALIGNED_AT_MOST = 16


class Split(NamedTuple):
    """The work list; int32. Made from lengths only, so that XLA makes it once for all layers of a step."""

    first_unit_A: jax.Array
    first_page_A: jax.Array  # within first_unit
    last_unit_A: jax.Array  # inclusive; below first_unit where a part is empty
    end_page_A: jax.Array  # within last_unit, exclusive
    # The unit whose last item is this part's first, if that unit began in an earlier part: every unit of more than
    # one item is closed by exactly one part. Its items are first_item .. first_item + items - 1; 0 items: none.
    first_item_A: jax.Array
    items_A: jax.Array
    # Of every unit: how many items it was cut into, 1 where it is whole, and the number of its first.
    items_U: jax.Array
    first_item_U: jax.Array


class Field(IntEnum):
    """Columns of `records`. From IDS on: ids of the first pages of the part's first item."""

    FIRST_UNIT = 0
    FIRST_PAGE = 1
    LAST_UNIT = 2
    END_PAGE = 3
    FIRST_TOKENS = 4  # length of the first unit's row
    FIRST_ITEMS = 5  # items of the first unit, and the number of the first of them
    FIRST_SLOT = 6
    LAST_ITEMS = 7  # the same of the last unit
    LAST_SLOT = 8
    LAST_MERGERS = 9  # the parts that merge the last unit: all that end in it. Who closes it may go on with others
    IDS = 10


def num_items(parts: int, units: int) -> int:
    """Slots that partial results need."""
    return parts + units


def unit_pages(length_tokens: jax.Array, page_tokens: int) -> jax.Array:
    """Pages of a unit. An empty row gets one, of which no token is live: that is what makes its output zeros."""
    return jnp.maximum(lax.div(length_tokens + (page_tokens - 1), jnp.int32(page_tokens)), 1)


def split_pages(
    length_B: jax.Array, *, kv_heads: int, page_tokens: int, parts: int, min_pages: int, align: bool = False
) -> Split:
    """length_B: int32 tokens. A part gets `min_pages` pages at least, as long as there are any.

    align: units of one size are cut evenly or not at all, see _ALIGNED_AT_MOST.
    """
    pages_U = jnp.repeat(unit_pages(length_B, page_tokens), kv_heads)
    end_U = jnp.cumsum(pages_U, dtype=jnp.int32)
    start_U = end_U - pages_U
    total = end_U[-1]
    quota = jnp.maximum((total + parts - 1) // parts, min_pages)
    if align:
        quota = _aligned(quota, pages_U)
    start_A = jnp.arange(parts, dtype=jnp.int32) * quota
    end_A = jnp.minimum(start_A + quota, total)
    empty_A = start_A >= total
    # Comparing with all units is one small fusion; a binary search would be a loop of launches.
    first_unit_A = jnp.where(empty_A, 0, (end_U <= start_A[:, None]).sum(axis=1, dtype=jnp.int32))
    last_unit_A = jnp.where(empty_A, -1, (end_U < end_A[:, None]).sum(axis=1, dtype=jnp.int32))
    first_page_A = jnp.where(empty_A, 0, start_A - start_U[first_unit_A])
    closes_A = (first_page_A > 0) & (end_U[first_unit_A] <= end_A)
    first_part_U = start_U // quota
    first_part_A = first_part_U[first_unit_A]
    return Split(
        first_unit_A=first_unit_A,
        first_page_A=first_page_A,
        last_unit_A=last_unit_A,
        end_page_A=jnp.where(empty_A, 0, end_A - start_U[last_unit_A]),
        first_item_A=first_part_A + first_unit_A,
        items_A=jnp.where(closes_A, jnp.arange(parts, dtype=jnp.int32) - first_part_A + 1, 0),
        items_U=(end_U - 1) // quota - first_part_U + 1,
        first_item_U=first_part_U + jnp.arange(len(start_U), dtype=jnp.int32),
    )


def split_rows(length_B: jax.Array, *, kv_heads: int, page_tokens: int, parts: int, min_pages: int) -> Split:
    """As split_pages, but where a unit is cut depends on its own length and on how many units and parts there are.

    A unit has parts // units parts of its own at most, which share its pages evenly, `min_pages` at least in each; it
    may need fewer, and what is used comes first. More units than parts: all are whole, neighbours share a part.
    """
    pages_U = jnp.repeat(unit_pages(length_B, page_tokens), kv_heads)
    units = pages_U.shape[0]
    if units > parts:
        return _whole_units(pages_U, parts)
    size_U = jnp.maximum((pages_U + parts // units - 1) // (parts // units), min_pages)
    items_U = (pages_U + size_U - 1) // size_U
    end_part_U = jnp.cumsum(items_U, dtype=jnp.int32)
    first_part_U = end_part_U - items_U
    part_A = jnp.arange(parts, dtype=jnp.int32)
    empty_A = part_A >= end_part_U[-1]
    unit_A = jnp.where(empty_A, 0, (end_part_U <= part_A[:, None]).sum(axis=1, dtype=jnp.int32))
    turn_A = part_A - first_part_U[unit_A]
    first_page_A = jnp.where(empty_A, 0, turn_A * size_U[unit_A])
    closes_A = ~empty_A & (turn_A > 0) & (turn_A == items_U[unit_A] - 1)
    return Split(
        first_unit_A=unit_A,
        first_page_A=first_page_A,
        last_unit_A=jnp.where(empty_A, -1, unit_A),
        end_page_A=jnp.where(empty_A, 0, jnp.minimum(first_page_A + size_U[unit_A], pages_U[unit_A])),
        first_item_A=first_part_U[unit_A] + unit_A,
        items_A=jnp.where(closes_A, items_U[unit_A], 0),
        items_U=items_U,
        first_item_U=first_part_U + jnp.arange(units, dtype=jnp.int32),
    )


def _whole_units(pages_U: jax.Array, parts: int) -> Split:
    """As many units in one part as in the next, give or take one, none of them cut."""
    units = pages_U.shape[0]
    part_A, unit_U = jnp.arange(parts, dtype=jnp.int32), jnp.arange(units, dtype=jnp.int32)
    first_unit_A, last_unit_A = part_A * units // parts, (part_A + 1) * units // parts - 1
    none_A = jnp.zeros_like(part_A)
    return Split(
        first_unit_A=first_unit_A,
        first_page_A=none_A,
        last_unit_A=last_unit_A,
        end_page_A=pages_U[last_unit_A],
        first_item_A=part_A + first_unit_A,
        items_A=none_A,
        items_U=jnp.ones_like(unit_U),
        first_item_U=unit_U + (last_unit_A < unit_U[:, None]).sum(axis=1, dtype=jnp.int32),
    )


def records(
    split: Split, table_BM: jax.Array, length_B: jax.Array, *, kv_heads: int, pool_pages: int, ids: int
) -> jax.Array:
    """int32 [A, Field.IDS + ids, up to a multiple of 4]: all that a part must know before its first copy, in a row.

    A CTA reads its row at once; unit, length and page id one after the other would cost three trips to memory. Ids
    are within the pool; those past the end of the first item, or of an empty part, mean nothing.
    """
    row_A = jnp.maximum(split.first_unit_A, 0) // kv_heads
    tokens_A = length_B[row_A]
    last_A = jnp.maximum(split.last_unit_A, 0)
    items_A, slot_A = split.items_U[last_A], split.first_item_U[last_A]
    closing_A = slot_A - last_A + items_A - 1  # the part with the last item of this part's last unit
    fields = (
        *(split.first_unit_A, split.first_page_A, split.last_unit_A, split.end_page_A, tokens_A),
        *(split.items_U[split.first_unit_A], split.first_item_U[split.first_unit_A]),
        *(items_A, slot_A, items_A - (split.last_unit_A[closing_A] > last_A)),
    )
    page_AI = split.first_page_A[:, None] + jnp.arange(ids, dtype=jnp.int32)
    page_AI = jnp.clip(page_AI, 0, table_BM.shape[1] - 1)
    id_AI = jnp.clip(table_BM[row_A[:, None], page_AI], 0, pool_pages - 1)
    spare = -(Field.IDS + ids) % 4
    return jnp.concatenate([jnp.stack(fields, axis=1), jnp.pad(id_AI, ((0, 0), (0, spare)))], axis=1)


def _aligned(quota: jax.Array, pages_U: jax.Array) -> jax.Array:
    """The next quota that cuts units of one size evenly, or the same one where they differ or it is too large."""
    pages = pages_U[0]
    whole = -(-quota // pages) * pages  # so many units a part
    pieces = jnp.maximum(pages // quota, 1)  # so many parts a unit
    even = jnp.where(quota > pages, whole, -(-pages // pieces))
    good = (pages_U == pages).all() & ((even - quota) * _ALIGNED_AT_MOST <= quota)
    return jnp.where(good, even, quota)
