"""The timed cases of gqa_decode and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import mosaic_gpu, xla
from pallas_kernels.timing import Problem, Step, sets_needed

PAGE_TOKENS = 64
# "gqa_decode HEADS/KV_HEADS [eHEAD_DIM] [sQUERY_TOKENS] bROWS kvTOKENS"; head dimension 128, no axis of query tokens
# where not said.
CASE_IDS = (
    "gqa_decode 32/2 b128 kv4k",
    "gqa_decode 32/2 b1 kv4k",
    "gqa_decode 32/2 b16 kv4k",
    "gqa_decode 32/2 b64 kv4k",
    "gqa_decode 32/2 b1 kv64k",
    "gqa_decode 32/8 b128 kv4k",
    "gqa_decode 32/8 b16 kv4k",
    "gqa_decode 32/32 b64 kv1k",
    "gqa_decode 32/32 b16 kv1k",
    "gqa_decode 40/40 b16 kv1k",
    "gqa_decode 9/3 e64 b16 kv1k",
    "gqa_decode 32/2 s2 b16 kv4k",
    "gqa_decode 32/2 s4 b64 kv4k",
    "gqa_decode 8/1 e256 b64 kv4k",
)
PATTERN = re.compile(r"gqa_decode (\d+)/(\d+)(?: e(\d+))?(?: s(\d+))? b(\d+) kv(\d+)(k?)")


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; every row has the case's length; pages in random order.

    As in a model: each call of a step has a layer's own pools; table and lengths are the step's.
    """
    heads, kv_heads, head_dim, tokens, rows, length, kilo = PATTERN.fullmatch(case_id).groups()
    N, E, B, S = int(kv_heads), int(head_dim or 128), int(rows), int(tokens or 1)
    G, L = int(heads) // N, int(length) * (1024 if kilo else 1)
    M = L // PAGE_TOKENS
    live_bytes = 2 * B * M * PAGE_TOKENS * N * E * 2
    *pool_keys, q_key = jax.random.split(jax.random.key(0), 1 + 2 * sets_needed(live_bytes))
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    pools = [normal(key, (B * M, N, PAGE_TOKENS, E), jnp.bfloat16) for key in pool_keys]
    sets = list(zip(pools[::2], pools[1::2], strict=True))
    q = normal(q_key, (B, *((S,) if tokens else ()), N, G, E), jnp.bfloat16)
    table_BM = jnp.asarray(np.random.default_rng(0).permutation(B * M).astype(np.int32).reshape(B, M))
    length_B = jnp.full((B,), L, jnp.int32)

    @jax.jit
    def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        exact = (array.astype(jnp.float32) for array in (q, k, v))
        return xla.run(*exact, table_BM, length_B, scale=E**-0.5, device=device)

    return Problem(
        case_id=case_id,
        first=q,
        shared=(table_BM, length_B),
        sets=sets,
        reference=lambda: reference(q, *sets[0]),  # as arguments: pages caught as constants would be copied
        least_bytes=live_bytes + 2 * q.nbytes,
        operations=4 * B * S * N * G * L * E,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: all tunings of the kernel and the XLA form, else only what is chosen."""
    shape = problem.first.shape
    queries = shape[-2] * (shape[1] if len(shape) == 5 else 1)
    tuning = mosaic_gpu.choose(shape[0] * shape[-3], shape[-1], queries, device)
    found = {"mosaic_gpu": _step(mosaic_gpu.run, device, tuning=tuning)}
    if every:
        for changes in (
            {"merge": "kernel"},
            {"align": False},
            {"min_pages": tuning.min_pages // 2},
            {"min_pages": tuning.min_pages * 2},
            {"stages": tuning.stages - 1},
        ):
            name = "mosaic_gpu " + " ".join(f"{key}={value}" for key, value in changes.items())
            found[name] = _step(mosaic_gpu.run, device, tuning=replace(tuning, **changes))
        if tuning.merge == "slices":
            found["mosaic_gpu last"] = _step(mosaic_gpu.run, device, tuning=mosaic_gpu.tuning_for(shape[-1], queries))
        elif shape[-1] % 128 == 0:
            slices = mosaic_gpu.tuning_in_slices(shape[-1], queries)
            found["mosaic_gpu slices"] = _step(mosaic_gpu.run, device, tuning=slices)
        found["xla"] = _step(xla.run, device)
    return found


def _step(run: Callable[..., jax.Array], device: Device, **options: Any) -> Step:
    def step(q: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        return run(q, *own, *shared, scale=q.shape[-1] ** -0.5, device=device, **options)

    return step
