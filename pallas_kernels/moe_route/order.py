"""Sorts assignments by expert and adds up their results, in plain XLA: counts instead of sorting.

A sort is a chain of launches on a GPU; each step here is one fused reduction, gather or scatter.
Dimension keys: T tokens, J experts a token, A = T J assignments, X experts, Z blocks of B assignments, D hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Up to here every pair of assignments is compared, in one fused reduction; above, only those of a block.
_DIRECT = 2048
_BLOCK = 512


def sort(expert_TJ: jax.Array, first: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The assignment of each sorted row, and place_TJ and size_X of the contract's Order."""
    A = expert_TJ.size
    local_A = expert_TJ.reshape(A).astype(jnp.int32) - jnp.asarray(first, jnp.int32)
    key_A = jnp.where((local_A >= 0) & (local_A < count), local_A, count)
    assignment_A, place_A, size_X = (_compare_all if A <= _DIRECT else _count_by_block)(key_A, count)
    return assignment_A, jnp.where(key_A < count, place_A, A).reshape(expert_TJ.shape), size_X


def _compare_all(key_A: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An assignment's place is the number of those that come before it."""
    A = key_A.shape[0]
    index_A = jnp.arange(A, dtype=jnp.int32)
    unique_A = key_A * A + index_A
    place_A = (unique_A < unique_A[:, None]).sum(axis=1, dtype=jnp.int32)
    assignment_A = jnp.where(place_A == index_A[:, None], index_A, 0).sum(axis=1, dtype=jnp.int32)
    size_X = (key_A == jnp.arange(count)[:, None]).sum(axis=1, dtype=jnp.int32)
    return assignment_A, place_A, size_X


def _count_by_block(key_A: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """place = assignments of lower keys + those of this key in earlier blocks + those of this key before it here."""
    A = key_A.shape[0]
    # What fills the last block has the highest key and the highest indices, so it takes no place below A.
    key_ZB = jnp.pad(key_A, (0, -A % _BLOCK), constant_values=count).reshape(-1, _BLOCK)
    place_B, place_Z, key_X = jnp.arange(_BLOCK), jnp.arange(key_ZB.shape[0]), jnp.arange(count + 1)
    # The order of axes keeps each sum a reduction along the last one, or over few blocks.
    before_ZB = ((key_ZB[:, None] == key_ZB[:, :, None]) & (place_B < place_B[:, None])).sum(axis=2, dtype=jnp.int32)
    size_ZX = (key_ZB[:, None] == key_X[:, None]).sum(axis=2, dtype=jnp.int32)
    size_X = size_ZX[:, :count].sum(axis=0, dtype=jnp.int32)
    first_X = jnp.where(key_X[:count] < key_X[:, None], size_X, 0).sum(axis=1, dtype=jnp.int32)
    earlier_ZX = jnp.where((place_Z < place_Z[:, None])[..., None], size_ZX, 0).sum(axis=1, dtype=jnp.int32)
    place_ZB = jnp.take_along_axis(first_X + earlier_ZX, key_ZB, axis=1, mode="clip") + before_ZB
    place_A = place_ZB.reshape(-1)[:A]
    assignment_A = (
        jnp.zeros(A, jnp.int32)
        .at[place_A]
        .set(jnp.arange(A, dtype=jnp.int32), mode="drop", unique_indices=True, wrap_negative_indices=False)
    )
    return assignment_A, place_A, size_X


def combine(y_AD: jax.Array, place_TJ: jax.Array) -> jax.Array:
    """fp32 [T, D]: gathers and adds; a scatter-add is slow on a GPU and rounds in any order."""
    A = y_AD.shape[0]
    rows_TJD = y_AD.at[place_TJ].get(mode="clip", wrap_negative_indices=False)
    # Rows that are not ours may hold NaN, and 0 * NaN is NaN: they are replaced.
    mine_TJ = (place_TJ >= 0) & (place_TJ < A)
    return jnp.where(mine_TJ[..., None], rows_TJD.astype(jnp.float32), 0.0).sum(axis=1)
