"""mla_prefill on Hopper: expands the latents of some heads into scratch memory and attends to them, pass after pass.

One pass does all heads where the scratch holds the contexts of all chunks, as it nearly always does. How many heads
fit is known on the device only, so further passes are in the program, and only run where they are needed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.mla_prefill.common import PAGE_TOKENS, Tuning
from pallas_kernels.mla_prefill.contract import MlaPrefillShapes
from pallas_kernels.mla_prefill.expand import expand
from pallas_kernels.mla_prefill.kernel import attend
from pallas_kernels.mla_prefill.tiles import head_rows, plan
from pallas_kernels.query_tiles import TILE_TOKENS
from pallas_kernels.tile_attention import COLUMNS

# Of keys and values. One head's longest contexts must fit, for which it may grow up to the limit.
_SCRATCH_BYTES = 2 << 30
_SCRATCH_LIMIT_BYTES = 4 << 30
# Where more may be needed they are a loop, which keeps the program small, but which XLA makes no graph of.
_UNROLLED_PASSES = 4


def why_not(shapes: MlaPrefillShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if shapes.rope_dim != COLUMNS:
        return f"there are {shapes.rope_dim} rope dimensions, must be {COLUMNS}."
    if (shapes.nope_dim, shapes.value_dim) not in ((128, 128), (192, 256)):
        return f"nope and value dimensions are {shapes.nope_dim} and {shapes.value_dim}, must be 128, 128 or 192, 256."
    if shapes.rank != 512:
        return f"the rank is {shapes.rank}, must be 512."
    scratch_bytes = head_rows(shapes.chunks, shapes.max_pages * PAGE_TOKENS) * _row_bytes(shapes)
    if scratch_bytes > _SCRATCH_LIMIT_BYTES:
        return (
            f"{shapes.chunks} chunks of up to {shapes.max_pages} pages need {scratch_bytes >> 20} MiB of scratch "
            f"memory a head, must be at most {_SCRATCH_LIMIT_BYTES >> 20}."
        )
    return None


def _row_bytes(shapes: MlaPrefillShapes) -> int:
    return (shapes.nope_dim + shapes.value_dim) * 2


# Under jit of its own, the op of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "device", "tuning", "scratch_bytes", "interpret"))
def run(
    q_THE: jax.Array,
    latent_PKL: jax.Array,
    key_up_HNR: jax.Array,
    value_up_HVR: jax.Array,
    table_RM: jax.Array,
    start_R: jax.Array,
    tokens_R: jax.Array,
    position_R: jax.Array,
    *,
    scale: float,
    device: Device,
    tuning: Tuning | None = None,
    scratch_bytes: int = _SCRATCH_BYTES,
    into_THV: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU.

    scratch_bytes: of the expanded keys and values, if one head's fit. into_THV: the array to write the result into.
    """
    T, H, _ = q_THE.shape
    row_bytes = (key_up_HNR.shape[1] + value_up_HVR.shape[1]) * 2
    request_tokens = table_RM.shape[1] * PAGE_TOKENS
    most_rows = head_rows(table_RM.shape[0], request_tokens)
    scratch_rows = min(max(scratch_bytes // row_bytes, most_rows), most_rows * H) // TILE_TOKENS * TILE_TOKENS
    # A tile's rows are read whole, so there must be as many.
    q_THE = jnp.pad(q_THE, ((0, max(0, TILE_TOKENS - T)), (0, 0), (0, 0)))
    tiles, where = plan(
        start_R,
        tokens_R,
        position_R,
        tokens=q_THE.shape[0],
        request_tokens=request_tokens,
        heads=H,
        row_bytes=row_bytes,
        scratch_rows=scratch_rows,
    )
    tuning = tuning or Tuning.of(key_up_HNR.shape[1] + value_up_HVR.shape[1])

    def one_pass(index: jax.typing.ArrayLike, out_THV: jax.Array | None) -> jax.Array:
        pass_1 = jnp.full((1,), index, jnp.int32)
        options = {"scratch_rows": scratch_rows, "tuning": tuning, "interpret": interpret}
        key_ZN, value_ZV = expand(latent_PKL, key_up_HNR, value_up_HVR, table_RM, pass_1, where, **options)
        options = {"scale": scale, "tuning": tuning, "into_THV": out_THV, "interpret": interpret}
        arrays = (q_THE, latent_PKL, key_ZN, value_ZV, table_RM, pass_1)
        return attend(*arrays, tiles, where.sizes_3, **options)

    def more_passes(out_THV: jax.Array) -> jax.Array:
        if most_passes > _UNROLLED_PASSES:
            return lax.fori_loop(1, H // where.sizes_3[1], one_pass, out_THV)
        for index in range(1, most_passes):
            out_THV = one_pass(index, out_THV)
        return out_THV

    out_THV = one_pass(0, into_THV)
    least_heads = max(n for n in range(1, H + 1) if H % n == 0 and (n * most_rows <= scratch_rows or n == 1))
    most_passes = H // least_heads
    if most_passes > 1:
        out_THV = lax.cond(where.sizes_3[1] < H, more_passes, lambda out_THV: out_THV, out_THV)
    return out_THV[:T]
