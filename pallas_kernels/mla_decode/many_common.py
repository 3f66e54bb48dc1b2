"""What the warpgroups of many_turns.py share: how a page lies in shared memory, and the walk over a part's items."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.common import LATENT_DIM, PAGE_TOKENS, RANK
from pallas_kernels.mla_decode.work_list import Meeting, record
from pallas_kernels.split import unit_pages

BLOCK_QUERIES = 64
ROW: Any = plgpu.Layout.WGMMA.reduce(1)  # one value a query
ROPE_DIM = LATENT_DIM - RANK
BOX = 128  # columns
BOXES = RANK // BOX  # of a page
OWN = BOXES // 2  # of a page, that one of the two adding warpgroups reads
ORDER = (0, 2, 1, 3)  # of a page's boxes in the ring: the adding warpgroups go through theirs at the same time
SLOTS = 10  # boxes in shared memory
STAGES = 2  # of the rotated part, which scores alone read
HELD = 2  # boxes of the queries that registers hold, beside the rotated part
ENDS = 3  # items whose sums are kept
REGISTERS = (160, 168, 24)  # a thread's of the adding, scoring, copying warpgroups

# visit(index in its part, row, length, first page, end page, pages of the part before it, meeting)
Visit = Callable[..., None]


def for_each_item(r: SimpleNamespace, visit: Visit) -> tuple[jax.Array, jax.Array]:
    """Visits each item of the part; gives the number of items, and of pages."""
    mine = record(r.record_AW, lax.axis_index("part"))

    def item(row: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before, start, end, length = state
        # The next row's length is read early: its latency hides behind this row. Nor does a start wait for a length.
        next_length = r.length_B[jnp.minimum(row + 1, mine.last)]
        meetings = zip(mine.at_first, mine.at_last, Meeting(1, 0, 1), strict=True)
        meeting = [jnp.where(row == mine.first, a, jnp.where(row == mine.last, b, c)) for a, b, c in meetings]
        visit(row - mine.first, row, length, start, end, before, Meeting(*meeting))
        next_end = jnp.where(row + 1 == mine.last, mine.last_end, unit_pages(next_length, PAGE_TOKENS))
        return before + end - start, jnp.int32(0), next_end, next_length

    start = (jnp.int32(0), mine.first_page, mine.first_end, mine.first_length)
    pages = lax.fori_loop(mine.first, mine.last + 1, item, start)[0]
    return mine.last + 1 - mine.first, pages


def slot_of(place: jax.Array, box: int | jax.Array) -> jax.Array:
    """Where a box of the part's n-th page (queries counted, too) lies in the ring."""
    return lax.rem(place * BOXES + box, jnp.int32(SLOTS))
