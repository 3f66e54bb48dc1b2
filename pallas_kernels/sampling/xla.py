"""sampling in plain XLA: what runs where no native kernel fits.

Thresholds are searched bit by bit, from the highest down, which is exact; each bit is one read of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.sampling.contract import SamplingShapes

_CHUNK = 128


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
    kept_BV = jnp.ones(x_BV.shape, bool)
    if top_k_B is not None or top_p_B is not None:
        kept_BV = likely(x_BV, weight_BV, top_k_B, top_p_B)
    if min_p_B is not None:
        least_B1 = min_p_B[:, None]
        if temperature_B is None:
            kept_BV &= x_BV >= peak_B1 * least_B1
        else:
            kept_BV &= x_BV >= peak_B1 + jnp.log(least_B1) * temperature_B[:, None]
    left_BV = jnp.where(kept_BV, weight_BV, 0.0)
    whole_B = left_BV.sum(axis=1)
    token_B = draw(left_BV, jnp.minimum(uniform_B * whole_B, jnp.nextafter(whole_B, 0.0)))
    good_B = (whole_B > 0) & jnp.isfinite(whole_B)
    return jnp.where(good_B, token_B, 0), jnp.where(good_B, kept_BV.sum(axis=1, dtype=jnp.int32), 0)


def likely(x_BV: jax.Array, weight_BV: jax.Array, top_k_B: jax.Array | None, top_p_B: jax.Array | None) -> jax.Array:
    """bool [B, V]: what top_k leaves, and top_p of that; None: off for all rows."""
    order_BV = ordered_bits(x_BV)
    highest_B = order_BV.max(axis=1)
    kept_BV = jnp.ones(x_BV.shape, bool)
    if top_k_B is not None:
        wanted_B = jnp.where((top_k_B > 0) & (top_k_B < x_BV.shape[1]), top_k_B, x_BV.shape[1])
        by_k_B = largest_threshold(lambda t: jnp.sum(order_BV >= t[:, None], axis=1) >= wanted_B, highest_B)
        kept_BV = order_BV >= by_k_B[:, None]
    if top_p_B is not None:
        left_BV = jnp.where(kept_BV, weight_BV, 0.0)
        mass_B = top_p_B * left_BV.sum(axis=1)
        by_p_B = largest_threshold(
            lambda t: jnp.sum(jnp.where(order_BV >= t[:, None], left_BV, 0.0), axis=1) >= mass_B, highest_B
        )
        kept_BV &= (order_BV >= by_p_B[:, None]) | (top_p_B >= 1.0)[:, None]
    return kept_BV


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
