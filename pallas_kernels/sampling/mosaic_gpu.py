"""sampling on Hopper: maxima and masses of chunks of each row, then the search in the few chunks that matter."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.sampling.chunks import chunk_stats
from pallas_kernels.sampling.common import CHUNK, LARGEST_VOCAB, LEAST_CHUNKS, Tuning
from pallas_kernels.sampling.contract import SamplingShapes
from pallas_kernels.sampling.select import select


def why_not(shapes: SamplingShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.vocab > LARGEST_VOCAB:
        return f"the vocabulary has {shapes.vocab} tokens, must be {LARGEST_VOCAB} at most."
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
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU."""
    rows = x_BV.shape[0]
    # Filters that let all pass, in place of None, so that a program's two calls, with filters and without, are one.
    top_k_B = jnp.zeros(rows, jnp.int32) if top_k_B is None else top_k_B
    top_p_B = jnp.ones(rows, jnp.float32) if top_p_B is None else top_p_B
    min_p_B = jnp.zeros(rows, jnp.float32) if min_p_B is None else min_p_B
    return _run(x_BV, uniform_B, top_k_B, top_p_B, min_p_B, temperature_B, tuning=tuning, interpret=interpret)


# Under jit of its own, the kernels are traced, lowered and compiled once, not once a call.
@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def _run(
    x_BV: jax.Array,
    uniform_B: jax.Array,
    top_k_B: jax.Array,
    top_p_B: jax.Array,
    min_p_B: jax.Array,
    temperature_B: jax.Array | None,
    *,
    tuning: Tuning | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    tuning = tuning or Tuning()
    rows, vocab = x_BV.shape
    chunks = max(-(-vocab // CHUNK), LEAST_CHUNKS)
    scale_B = None
    if temperature_B is not None:
        scale_B = math.log2(math.e) / temperature_B
        min_p_B = jnp.log(min_p_B) * temperature_B
    if chunks * CHUNK != vocab:
        # A copy of all rows: published vocabularies are multiples of the chunk and have none.
        filler = 0.0 if temperature_B is None else -jnp.inf
        x_BV = jnp.pad(x_BV, ((0, 0), (0, chunks * CHUNK - vocab)), constant_values=filler)
        top_k_B = jnp.where(top_k_B < vocab, top_k_B, 0)
    x_BCL = x_BV.reshape(rows, chunks, CHUNK)
    max_BC, mass_BC = chunk_stats(x_BCL, scale_B, tuning=tuning, interpret=interpret)
    numbers = (uniform_B, top_k_B, top_p_B, min_p_B, *(() if scale_B is None else (scale_B,)))
    return select(x_BCL, max_BC, mass_BC, numbers, vocab=vocab, tuning=tuning, interpret=interpret)
