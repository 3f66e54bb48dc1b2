"""dense_gemm on Hopper: chooses the tuning and runs the kernel of kernel.py."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemm.contract import SYNC_WORDS, DenseGemmShapes, Stage
from pallas_kernels.dense_gemm.kernel import HALF, STEP, TILE, Tuning, dense, padded, sync_words
from pallas_kernels.device import Device

MOST_TOKENS = 128
_SHARED_BYTES = 232_448 - 1024  # less what barriers take
_MOST_SLOTS = 12


def why_not(shapes: DenseGemmShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if not 1 <= shapes.tokens <= MOST_TOKENS:
        return f"there are {shapes.tokens} tokens, must be 1 to {MOST_TOKENS}."
    for number, (K, N) in enumerate(zip(shapes.inner, shapes.columns, strict=True)):
        if K % STEP:
            return f"stage {number} sums over {K}, must be a multiple of {STEP}."
        if N % HALF or N < TILE:
            return f"stage {number} has {N} columns, must be a multiple of {HALF} and {TILE} at least."
    if sync_words(len(shapes.stages), Tuning()) > SYNC_WORDS:
        return f"there are {len(shapes.stages)} stages in a row, too many for the {SYNC_WORDS} counters."
    return None


def tuning_for(tokens: int, stages: tuple[Stage, ...]) -> Tuning:
    """By the tokens: tall tiles where tokens are many, so that they are read from the L2 less often."""
    return fitted(Tuning(blocks=2 if tokens > 32 else 1), tokens, stages)


def fitted(tuning: Tuning, tokens: int, stages: tuple[Stage, ...]) -> Tuning:
    """With as many slots as shared memory holds."""
    rows = padded(tokens)
    adds = any(stage.residual is not None for stage in stages)
    exact = any(stage.exact for stage in stages)
    blocks = 2 if all(stage.gated for stage in stages) else tuning.blocks
    results = 2 * HALF * (2 * (rows + (rows if adds else 8)) + 4 * (rows if exact else 8))
    left = _SHARED_BYTES - results - 2048
    # A slot of weights, and its share of a slot of tokens.
    slots = min(_MOST_SLOTS, left // (2 * STEP * (TILE + rows // blocks)))
    token_slots = max(2, slots // blocks)
    slots = min(_MOST_SLOTS, (left - token_slots * 2 * STEP * rows) // (2 * STEP * TILE))
    return dataclasses.replace(tuning, slots=slots, token_slots=token_slots)


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("stages", "device", "tuning", "interpret"))
def run(
    stages: tuple[Stage, ...],
    arrays: dict[str, jax.Array],
    *,
    ahead: tuple[jax.Array, ...] = (),
    sync: Any = None,
    device: Device,
    tuning: Tuning | None = None,
    out_TN: jax.Array | None = None,
    interpret: Any = None,
) -> list[jax.Array]:
    """[T, N] of each stage; see xla.run. out_TN: the last stage's result is written over it, in place.

    `interpret` runs the same kernel in the interpreter, on a CPU, a stage at a time.
    """
    tuning = tuning or tuning_for(arrays["x"].shape[0], stages)
    if sync is None:
        sync = jax.new_ref(jnp.zeros((sync_words(len(stages), tuning),), jnp.int32))
    if interpret is None:
        made = dense(stages, arrays, ahead, sync, out_TN, tuning=tuning)
    else:
        made = {}
        for number in range(len(stages)):
            out = out_TN if number == len(stages) - 1 else None
            made |= dense(stages, arrays | made, (), sync, out, tuning=tuning, only=number, interpret=interpret)
    return [made[f"y{number}"] for number in range(len(stages))]
