"""gqa_decode on Hopper: cuts the pages into equal parts and runs the two kernels of kernel.py."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.gqa_decode.kernel import PAGE_TOKENS, Tuning, decode, num_words, padded, unit_rows
from pallas_kernels.grid_sync import zero_words
from pallas_kernels.split import records, split_pages, split_rows

_CTA_BYTES, _HALF_SM_BYTES = 232448, 115712  # shared memory of the one CTA of an SM, and of each of two
_WAITING_PARTS = 128  # one CTA an SM, and a power of two, as mla_decode's
# A fixed split: several parts for each of a batch's units, though most are empty while the batch is small.
_FIXED_PARTS = 1056
_SLICED_UNITS = 32  # rows x kv heads; with more, slices were slower (NOTES.md)
_MOST_PRODUCTS = 8192  # head dimension x queries of a unit: a thread's registers


def why_not(shapes: GqaDecodeShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.page_tokens != PAGE_TOKENS:
        return f"page size is {shapes.page_tokens} tokens, must be {PAGE_TOKENS}."
    if shapes.head_dim not in (64, 128, 256):
        return f"head dimension is {shapes.head_dim}, must be 64, 128 or 256."
    most = _MOST_PRODUCTS // max(shapes.head_dim, 128)
    if padded(shapes.tokens * shapes.group) > most:
        given = f"{shapes.tokens * shapes.group} queries ({shapes.tokens} tokens x {shapes.group} heads)"
        return f"a kv head has {given}, must be {most} at most for this head dimension."
    return None


def choose(units: int, head_dim: int, queries: int, device: Device, invariant: bool = False) -> Tuning:
    """units: rows x kv heads. A bucket of few rows may have one live row only, whose latency is what counts."""
    if invariant:  # no part waits for another, so there may be more than run at once
        return dataclasses.replace(tuning_for(head_dim, queries), parts=_FIXED_PARTS)
    in_slices = units <= _SLICED_UNITS and head_dim % 128 == 0 and device.sms >= _WAITING_PARTS
    return tuning_in_slices(head_dim, queries) if in_slices else tuning_for(head_dim, queries)


def tuning_for(head_dim: int, queries: int) -> Tuning:
    """As many pages in flight as shared memory holds: of two CTAs an SM, or of one where two are too small."""
    heads = padded(queries)
    other_bytes, page_bytes = _shared_bytes(head_dim, heads)
    stages = (_HALF_SM_BYTES - other_bytes) // page_bytes
    if heads <= 16 and stages >= 3:
        return Tuning(stages=stages)
    return Tuning(parts=132, stages=(_CTA_BYTES - other_bytes) // page_bytes)


def tuning_in_slices(head_dim: int, queries: int) -> Tuning:
    """For heads of 128 or 256 where latency counts: one CTA an SM, since parts that wait must all run at once."""
    other_bytes, page_bytes = _shared_bytes(head_dim, padded(queries))
    return Tuning(parts=_WAITING_PARTS, stages=(_CTA_BYTES - other_bytes) // page_bytes, min_pages=2, merge="slices")


def _shared_bytes(head_dim: int, heads: int) -> tuple[int, int]:
    """Of shared memory: for queries, output, weights, reductions, barriers; and for a page of keys and values."""
    return 2 * heads * (2 * head_dim + PAGE_TOKENS) + 3072, 4 * PAGE_TOKENS * head_dim


# Under jit of its own, the kernels of all layers are traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "device", "invariant", "tuning", "interpret"))
def run(
    q: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    device: Device,
    invariant: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See the contract. `interpret` runs the same kernels in the interpreter, on a CPU.

    Raises:
      ValueError: the tuning lets more parts wait for each other than certainly run at once.
    """
    q_BSNGE = q if q.ndim == 5 else q[:, None]
    B, S, N, G, E = q_BSNGE.shape
    P, _, K, _ = k_PNKE.shape
    tuning = tuning or choose(B * N, E, S * G, device, invariant)
    if tuning.merge == "slices" and tuning.parts > device.sms:
        raise ValueError(f"there are {tuning.parts} parts that wait for each other, must be {device.sms} at most.")
    cut = {"kv_heads": N, "page_tokens": K, "parts": tuning.parts, "min_pages": tuning.min_pages}
    split = split_rows(length_B, **cut) if invariant else split_pages(length_B, **cut, align=tuning.align)
    words = zero_words(jnp.resize(split.items_U, (num_words(tuning.parts, B * N),)))
    out_BSNGE = decode(
        _queries(q_BSNGE),
        k_PNKE.reshape(P * N, K, E),
        v_PNKE.reshape(P * N, K, E),
        table_BM,
        length_B,
        records(split, table_BM, length_B, kv_heads=N, pool_pages=P, ids=tuning.stages),
        words,
        jnp.stack([split.items_U, split.first_item_U], axis=1),
        shape=q_BSNGE.shape,
        scale=scale,
        tuning=tuning,
        interpret=interpret,
    )
    return out_BSNGE.reshape(q.shape)


def _queries(q_BSNGE: jax.Array) -> jax.Array:
    """[C, E], a unit's queries one after the other: as they are where there is one query token."""
    B, S, N, G, E = q_BSNGE.shape
    rows = unit_rows(S, G)
    if S == 1:
        q_CE = q_BSNGE.reshape(B * N * G, E)
    else:
        q_BNQE = q_BSNGE.transpose(0, 2, 1, 3, 4).reshape(B, N, S * G, E)
        q_CE = jnp.pad(q_BNQE, ((0, 0), (0, 0), (0, rows - S * G), (0, 0))).reshape(B * N * rows, E)
    missing = padded(S * G) - len(q_CE)
    return jnp.pad(q_CE, ((0, missing), (0, 0))) if missing > 0 else q_CE
