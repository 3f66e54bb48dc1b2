"""sampling in plain XLA: what runs where no native kernel fits.

Thresholds are searched bit by bit, from the highest down, which is exact; each bit is one read of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.sampling.contract import SamplingShapes

_CHUNK = 128


class Columns(Protocol):
    """Where the columns of a row are: what is found of some becomes what holds of all."""

    @property
    def width(self) -> int:
        """Columns of a row, everywhere."""
        ...

    def sum(self, x: jax.Array) -> jax.Array:
        """Of a number of each part."""
        ...

    def max(self, x: jax.Array) -> jax.Array:
        """Of a number of each part."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """All columns of a row are here."""

    width: int

    def sum(self, x: jax.Array) -> jax.Array:
        """The one part's own."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """The one part's own."""
        return x


def why_not(shapes: SamplingShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    x_BV: jax.Array,
    uniform_B: jax.Array,
    top_k_B: jax.Array | None = None,
    top_p_B: jax.Array | None = None,
    min_p_B: jax.Array | None = None,
    temperature_B: jax.Array | None = None,
    *,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """See the contract."""
    peak_B1 = x_BV.max(axis=1, keepdims=True)
    weight_BV = x_BV
    if temperature_B is not None:
        weight_BV = jnp.exp((x_BV - jnp.where(jnp.isfinite(peak_B1), peak_B1, 0.0)) / temperature_B[:, None])
    filters = (top_k_B, top_p_B, min_p_B, temperature_B)
    kept_BV = kept(x_BV, weight_BV, peak_B1, *filters, Whole(x_BV.shape[1]))
    left_BV = jnp.where(kept_BV, weight_BV, 0.0)
    whole_B = left_BV.sum(axis=1)
    token_B = draw(left_BV, jnp.minimum(uniform_B * whole_B, jnp.nextafter(whole_B, 0.0)))
    # Of all weights: a NaN is below every threshold, and what is left without it would look good.
    good_B = (whole_B > 0) & jnp.isfinite(weight_BV.sum(axis=1))
    return jnp.where(good_B, token_B, 0), jnp.where(good_B, kept_BV.sum(axis=1, dtype=jnp.int32), 0)


def kept(
    x_BV: jax.Array,
    weight_BV: jax.Array,
    peak_B1: jax.Array,
    top_k_B: jax.Array | None,
    top_p_B: jax.Array | None,
    min_p_B: jax.Array | None,
    temperature_B: jax.Array | None,
    columns: Columns,
) -> jax.Array:
    """bool [B, V]: what the filters leave of these columns; a filter that is None is off for all rows.

    peak_B1: the rows' largest x. temperature_B: None: x_BV are the weights themselves.
    """
    kept_BV = jnp.ones(x_BV.shape, bool)
    if top_k_B is not None or top_p_B is not None:
        order_BV = ordered_bits(x_BV)
        highest_B = columns.max(order_BV.max(axis=1))

        def threshold(amount_BV: jax.Array | float, wanted_B: jax.Array) -> jax.Array:
            """Which columns are not below the largest threshold from which on the amounts reach what is wanted."""

            def reached(t_B: jax.Array) -> jax.Array:
                return columns.sum(jnp.where(order_BV >= t_B[:, None], amount_BV, 0).sum(axis=1)) >= wanted_B

            return order_BV >= largest_threshold(reached, highest_B)[:, None]

        if top_k_B is not None:
            some_B = (top_k_B > 0) & (top_k_B < columns.width)
            kept_BV = threshold(1, jnp.where(some_B, top_k_B, columns.width))
        if top_p_B is not None:
            left_BV = jnp.where(kept_BV, weight_BV, 0.0)
            mass_B = top_p_B * columns.sum(left_BV.sum(axis=1))
            kept_BV &= threshold(left_BV, mass_B) | (top_p_B >= 1.0)[:, None]
    if min_p_B is None:
        return kept_BV
    if temperature_B is None:
        return kept_BV & (x_BV >= peak_B1 * min_p_B[:, None])
    return kept_BV & (x_BV >= peak_B1 + (jnp.log(min_p_B) * temperature_B)[:, None])


def draw(weight_BV: jax.Array, target_B: jax.Array) -> jax.Array:
    """Ids int32 [B]: where each row's running sum passes its target, which is below the row's sum."""
    rows, vocab = weight_BV.shape
    weight_BCL = jnp.pad(weight_BV, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
    # In two levels: one read of the rows, then a running sum over a few numbers.
    mass_BC = weight_BCL.sum(axis=2)
    chunk_B, before_B = _passes(mass_BC, target_B)
    inside_BL = jnp.take_along_axis(weight_BCL, chunk_B[:, None, None], axis=1)[:, 0]
    place_B, _ = _passes(inside_BL, target_B - before_B)
    return chunk_B * _CHUNK + place_B


def _passes(weight_BC: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the running sum passes the target, int32 [B], and the sum before it; the last weight, if it never does."""
    running_BC = jnp.cumsum(weight_BC, axis=1)
    place_B = jnp.sum(running_BC <= target_B[:, None], axis=1, dtype=jnp.int32)
    last_B = jnp.where(weight_BC > 0, jnp.arange(weight_BC.shape[1], dtype=jnp.int32), 0).max(axis=1)
    place_B = jnp.minimum(place_B, last_B)
    before_B = jnp.take_along_axis(running_BC, jnp.maximum(place_B - 1, 0)[:, None], axis=1)[:, 0]
    return place_B, jnp.where(place_B > 0, before_B, 0.0)


def ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 whose unsigned order is the float order; -0.0 and 0.0 tie, as in the float order."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest_threshold(holds: Callable[[jax.Array], jax.Array], highest_B: jax.Array) -> jax.Array:
    """The largest threshold a row, up to `highest_B`, for which `holds`: true up to some point; uint32."""

    def bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
        candidate_B = found_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where((candidate_B <= highest_B) & holds(candidate_B), candidate_B, found_B)

    return lax.fori_loop(0, 32, bit, jnp.zeros(highest_B.shape, jnp.uint32))
