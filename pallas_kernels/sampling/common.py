"""What sampling's kernels share: sizes, tuning, floats as ordered integers, and the two searches by bisection.

`r` is one row as the second kernel sees it: its refs, and what was read or found of it so far (see select.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.lists import strided

CHUNK = 128  # neighbours whose maximum and mass are kept
LEAST_CHUNKS = 64  # of a row
LARGEST_VOCAB = 1 << 19  # 4096 chunk maxima are 32 registers a thread
# Layouts are written out, and inline code needs them so.
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
NEVER, INFINITE = float("-inf"), float("inf")
LEAST = -3e38  # finite: the difference of two of them is 0, not NaN

Measured = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    tiles: int = 2  # of 64 chunks, one after the other, a CTA of the first kernel
    list_rows: int = 32  # of 128 elements, of the list of likely elements
    few_rows: int = 4  # what is searched where no warp has more than 32 times as many
    guess: int = 256  # chunk maxima over the first threshold where top_k is off
    stages: int = 4  # tiles of 32 chunks in flight where a whole row is read again


def key_of(x: jax.Array) -> jax.Array:
    """A float as an int32 of the same order."""
    return _turn(lax.bitcast_convert_type(x, jnp.int32))


def value_of(key: jax.Array) -> jax.Array:
    """The float of a key."""
    return lax.bitcast_convert_type(_turn(key), jnp.float32)


def _turn(bits: jax.Array) -> jax.Array:
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def middle_of(low: jax.Array, high: jax.Array) -> jax.Array:
    """Half way, rounded down; the sum of two keys could overflow."""
    return (low & high) + ((low ^ high) >> 1)


def full(shape: tuple[int, ...], vec: int, value: float, dtype: Any) -> jax.Array:
    """An array of one value in layout strided(shape, vec)."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), strided(shape, vec))


def places(shape: tuple[int, ...], vec: int) -> jax.Array:
    """Each element's number, int32, rows one after the other."""
    axes = [plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=strided(shape, vec)) for axis in range(len(shape))]
    return axes[0] if len(shape) == 1 else axes[0] * shape[1] + axes[1]


def load(ref: Any, vec: int) -> jax.Array:
    """A ref's elements in layout strided(its shape, vec)."""
    return plgpu.load(ref, layout=strided(ref.shape, vec), optimized=False)


def weight_of(r: SimpleNamespace, x: jax.Array) -> jax.Array:
    """Probabilities as they are; of logits exp((x - peak) / temperature)."""
    return x if r.scale is None else jnp.exp2((x - r.peak) * r.scale)


def search(
    measure: Callable[[jax.Array], Measured],
    enough: Callable[..., jax.Array],
    settled: Callable[[Measured, Measured], jax.Array],
    low: jax.Array,
    high: jax.Array,
    at_low: Measured,
    at_high: Measured,
) -> tuple[jax.Array, Measured]:
    """Bisects keys until they meet or the set is settled: `low` is enough, `high` is not.

    measure: a threshold -> numbers of the elements from it on. enough: of these numbers. settled: of those at low and
    at high. Returns the last low, and its numbers.
    """
    width = len(at_low)

    def more(state: tuple[jax.Array, ...]) -> jax.Array:
        low, high, *rest = state
        return (low + 1 < high) & jnp.logical_not(settled(rest[:width], rest[width:]))

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, *rest = state
        middle = middle_of(low, high)
        found = measure(value_of(middle))
        good = enough(*found)
        at_low = [jnp.where(good, new, old) for new, old in zip(found, rest[:width], strict=True)]
        at_high = [jnp.where(good, old, new) for new, old in zip(found, rest[width:], strict=True)]
        return jnp.where(good, middle, low), jnp.where(good, high, middle), *at_low, *at_high

    low, _, *rest = lax.while_loop(more, halve, (low, high, *at_low, *at_high))
    return low, rest[:width]


def target_of(r: SimpleNamespace, whole: jax.Array) -> jax.Array:
    """What the running sum must pass: below the whole sum, whatever the rounding."""
    below = lax.bitcast_convert_type(lax.bitcast_convert_type(whole, jnp.int32) - 1, jnp.float32)
    return jnp.minimum(r.uniform_B[r.row] * whole, below)


def draw(weight: jax.Array, index: jax.Array, target: jax.Array, low: jax.Array) -> jax.Array:
    """The index at which the running sum, in the order of the indices, passes `target`; none is below `low`.

    The sum of what lies before an index is made in a fixed tree, which is monotone: no order of the elements is needed.
    """

    def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return state[0] + 1 < state[1]

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = middle_of(low, high)
        good = jnp.where(index < middle, weight, 0.0).sum() <= target
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    # Where rounding would lead past the last element that weighs something, that one is it.
    return lax.while_loop(more, halve, (low, jnp.where(weight > 0, index, low).max() + 1))[0]
