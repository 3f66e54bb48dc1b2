"""Cuts the pages of all rows into equal parts, one a CTA: takes lengths, gives the kernels their work list.

Rows and kv heads are laid end to end, unit u = row * N + head, each with its row's number of pages, and the line of
pages is cut every `quota` pages. A part may hold the end of one unit, whole units, and the start of another; each
piece of a unit that a part holds is an item. Walking the line, every item either enters the next part or the next
unit, so part + unit numbers the items without gaps in a unit: that is where an item's partial result lies.
Dimension keys: A parts (CTAs), U units.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Split(NamedTuple):
    """The work list; int32. Made from lengths only, so that XLA makes it once for all layers of a step."""

    first_unit_A: jax.Array
    first_page_A: jax.Array  # within first_unit
    last_unit_A: jax.Array  # inclusive; below first_unit where a part is empty
    end_page_A: jax.Array  # within last_unit, exclusive
    first_item_U: jax.Array
    items_U: jax.Array  # 0: the unit has no pages


def num_items(parts: int, units: int) -> int:
    """Slots that partial results need."""
    return parts + units


def split_pages(length_B: jax.Array, *, kv_heads: int, page_tokens: int, parts: int, min_pages: int) -> Split:
    """length_B: int32 tokens. No part gets fewer than `min_pages` pages while another has more."""
    pages_U = jnp.repeat((length_B + page_tokens - 1) // page_tokens, kv_heads)
    end_U = jnp.cumsum(pages_U, dtype=jnp.int32)
    start_U = end_U - pages_U
    total = end_U[-1]
    quota = jnp.maximum((total + parts - 1) // parts, min_pages)
    start_A = jnp.arange(parts, dtype=jnp.int32) * quota
    end_A = jnp.minimum(start_A + quota, total)
    # Comparing with all units is one small fusion; a binary search would be a loop of launches.
    first_unit_A = (end_U <= start_A[:, None]).sum(axis=1, dtype=jnp.int32)
    last_unit_A = (end_U <= end_A[:, None] - 1).sum(axis=1, dtype=jnp.int32)
    empty_A = start_A >= total
    first_part_U = start_U // quota
    return Split(
        first_unit_A=jnp.where(empty_A, 0, first_unit_A),
        first_page_A=jnp.where(empty_A, 0, start_A - start_U.at[first_unit_A].get(mode="clip")),
        last_unit_A=jnp.where(empty_A, -1, last_unit_A),
        end_page_A=jnp.where(empty_A, 0, end_A - start_U.at[last_unit_A].get(mode="clip")),
        first_item_U=first_part_U + jnp.arange(pages_U.shape[0], dtype=jnp.int32),
        items_U=jnp.where(pages_U > 0, (end_U - 1) // quota - first_part_U + 1, 0),
    )
