"""What a CTA of few_heads.py must know, in one line of memory: takes lengths and their split, gives a record a part.

Dimension keys: A parts, W words of a record.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.split import Split, unit_pages

_WORDS = 16  # of a record, the last ones unused: 64 bytes


class Meeting[T](NamedTuple):
    """The items of one row: in parts begin .. begin + items - 1, which all meet to merge them."""

    items: T
    begin: T
    # The first so many parts merge, each its slice. The part that closes a row merges only if it has no further rows.
    mergers: T


class Record[T](NamedTuple):
    """The work of a part: rows first .. last, from one page to another; empty where last is below first."""

    first: T
    last: T
    first_page: T  # of the first row
    first_end: T  # the page after the part's last one of the first row
    last_end: T  # the same of the last row
    first_length: T
    at_first: Meeting[T]
    at_last: Meeting[T]


_FORM = jax.tree.structure(Record(0, 0, 0, 0, 0, 0, Meeting(0, 0, 0), Meeting(0, 0, 0)))


def records(length_B: jax.Array, split: Split, *, page_tokens: int) -> jax.Array:
    """int32 [A, W]: made once a step from lengths only, read by `record`."""
    used_A = split.last_unit_A >= split.first_unit_A

    def meeting(row_A: jax.Array) -> Meeting[jax.Array]:
        # Rows lie in order over the parts: a row begins in the first part that reaches it.
        begin_A = ((split.last_unit_A < row_A[:, None]) & used_A).sum(axis=1, dtype=jnp.int32)
        end_A = ((split.first_unit_A <= row_A[:, None]) & used_A).sum(axis=1, dtype=jnp.int32) - 1
        goes_on_A = split.last_unit_A[end_A] > row_A
        items_A = end_A - begin_A + 1
        return Meeting(items_A, begin_A, items_A - goes_on_A)

    first_A, last_A = split.first_unit_A, split.last_unit_A
    length_A, end_A = length_B[first_A], split.end_page_A
    first_end_A = jnp.where(first_A == last_A, end_A, unit_pages(length_A, page_tokens))
    pages = (split.first_page_A, first_end_A, end_A)
    words = Record(first_A, last_A, *pages, length_A, meeting(first_A), meeting(last_A))
    words_AW = jnp.stack(jax.tree.leaves(words), axis=1)
    return jnp.pad(words_AW, ((0, 0), (0, _WORDS - words_AW.shape[1])))


def record(records_AW: jax.Ref, part: jax.Array) -> Record[jax.Array]:
    """Scalars of a part, in a kernel; all loaded at once."""
    return jax.tree.unflatten(_FORM, [records_AW[part, index] for index in range(_FORM.num_leaves)])
