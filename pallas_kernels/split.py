"""Cuts the pages of all rows into equal parts, one a CTA: takes lengths, gives the kernels their work list.

Rows and kv heads are laid end to end, unit u = row * N + head, each with its row's number of pages, and the line of
pages is cut every `quota` pages. A part may hold the end of one unit, whole units, and the start of another; each
piece of a unit that a part holds is an item. Walking the line, every item either enters the next part or the next
unit, so part + unit numbers the items without gaps in a unit: that is where an item's partial result lies.
Latent attention has one kv head: there a unit is a row. Dimension keys: A parts (CTAs, or groups of them), U units.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


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


def num_items(parts: int, units: int) -> int:
    """Slots that partial results need."""
    return parts + units


def unit_pages(length_tokens: jax.Array, page_tokens: int) -> jax.Array:
    """Pages of a unit. An empty row gets one, of which no token is live: that is what makes its output zeros."""
    return jnp.maximum(lax.div(length_tokens + (page_tokens - 1), jnp.int32(page_tokens)), 1)


def split_pages(length_B: jax.Array, *, kv_heads: int, page_tokens: int, parts: int, min_pages: int) -> Split:
    """length_B: int32 tokens. A part gets `min_pages` pages at least, as long as there are any."""
    pages_U = jnp.repeat(unit_pages(length_B, page_tokens), kv_heads)
    end_U = jnp.cumsum(pages_U, dtype=jnp.int32)
    start_U = end_U - pages_U
    total = end_U[-1]
    quota = jnp.maximum((total + parts - 1) // parts, min_pages)
    start_A = jnp.arange(parts, dtype=jnp.int32) * quota
    end_A = jnp.minimum(start_A + quota, total)
    empty_A = start_A >= total
    # Comparing with all units is one small fusion; a binary search would be a loop of launches.
    first_unit_A = jnp.where(empty_A, 0, (end_U <= start_A[:, None]).sum(axis=1, dtype=jnp.int32))
    last_unit_A = jnp.where(empty_A, -1, (end_U < end_A[:, None]).sum(axis=1, dtype=jnp.int32))
    first_page_A = jnp.where(empty_A, 0, start_A - start_U[first_unit_A])
    closes_A = (first_page_A > 0) & (end_U[first_unit_A] <= end_A)
    first_part_A = start_U[first_unit_A] // quota
    return Split(
        first_unit_A=first_unit_A,
        first_page_A=first_page_A,
        last_unit_A=last_unit_A,
        end_page_A=jnp.where(empty_A, 0, end_A - start_U[last_unit_A]),
        first_item_A=first_part_A + first_unit_A,
        items_A=jnp.where(closes_A, jnp.arange(parts, dtype=jnp.int32) - first_part_A + 1, 0),
    )
