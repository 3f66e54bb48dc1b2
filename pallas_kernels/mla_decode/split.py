"""Cuts the pages of all rows into equal parts, one a CTA: takes lengths, gives the kernels their work list.

Rows are laid end to end, each with its number of pages, and the line of pages is cut every `quota` pages. A part may
hold the end of one row, whole rows, and the start of another; each piece of a row that a part holds is an item.
Walking the line, every item either enters the next part or the next row, so part + row numbers the items without gaps
in a row: that is where an item's partial result lies. Dimension key: A parts (CTAs, or groups of them).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Split(NamedTuple):
    """The work list; int32. Made from lengths only, so that XLA makes it once for all layers of a step."""

    first_row_A: jax.Array
    first_page_A: jax.Array  # within first_row
    last_row_A: jax.Array  # inclusive; below first_row where a part is empty
    end_page_A: jax.Array  # within last_row, exclusive
    # The row whose last item is this part's first, if that row began in an earlier part: every row of more than one
    # item is closed by exactly one part. Its items are first_item .. first_item + items - 1; 0 items: none.
    first_item_A: jax.Array
    items_A: jax.Array


def num_items(parts: int, rows: int) -> int:
    """Slots that partial results need."""
    return parts + rows


def row_pages(length_tokens: jax.Array, page_tokens: int) -> jax.Array:
    """Pages of a row. An empty row gets one, of which no token is live: that is what makes its output zeros."""
    return jnp.maximum(lax.div(length_tokens + (page_tokens - 1), jnp.int32(page_tokens)), 1)


def split_pages(length_B: jax.Array, *, page_tokens: int, parts: int, min_pages: int) -> Split:
    """length_B: int32 tokens. A part gets `min_pages` pages at least, as long as there are any."""
    pages_B = row_pages(length_B, page_tokens)
    end_B = jnp.cumsum(pages_B, dtype=jnp.int32)
    start_B = end_B - pages_B
    total = end_B[-1]
    quota = jnp.maximum((total + parts - 1) // parts, min_pages)
    start_A = jnp.arange(parts, dtype=jnp.int32) * quota
    end_A = jnp.minimum(start_A + quota, total)
    empty_A = start_A >= total
    # Comparing with all rows is one small fusion; a binary search would be a loop of launches.
    first_row_A = jnp.where(empty_A, 0, (end_B <= start_A[:, None]).sum(axis=1, dtype=jnp.int32))
    last_row_A = jnp.where(empty_A, -1, (end_B < end_A[:, None]).sum(axis=1, dtype=jnp.int32))
    first_page_A = jnp.where(empty_A, 0, start_A - start_B[first_row_A])
    closes_A = (first_page_A > 0) & (end_B[first_row_A] <= end_A)
    first_part_A = start_B[first_row_A] // quota
    return Split(
        first_row_A=first_row_A,
        first_page_A=first_page_A,
        last_row_A=last_row_A,
        end_page_A=jnp.where(empty_A, 0, end_A - start_B[last_row_A]),
        first_item_A=first_part_A + first_row_A,
        items_A=jnp.where(closes_A, jnp.arange(parts, dtype=jnp.int32) - first_part_A + 1, 0),
    )
