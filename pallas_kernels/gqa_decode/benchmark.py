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
# "gqa_decode HEADS/KV_HEADS [eHEAD_DIM] bROWS kvTOKENS"; head dimension 128 where not said.
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
)
_PATTERN = re.compile(r"gqa_decode (\d+)/(\d+)(?: e(\d+))? b(\d+) kv(\d+)(k?)")


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; every row has the case's length; pages in random order."""
    heads, kv_heads, head_dim, rows, tokens, kilo = _PATTERN.fullmatch(case_id).groups()
    N, E, B = int(kv_heads), int(head_dim or 128), int(rows)
    G, length = int(heads) // N, int(tokens) * (1024 if kilo else 1)
    M = length // PAGE_TOKENS
    live_bytes = 2 * B * M * PAGE_TOKENS * N * E * 2
    sets = sets_needed(live_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (sets * B * M, N, PAGE_TOKENS, E)
    k, v = (jax.jit(lambda key: jax.random.normal(key, pool, jnp.bfloat16))(key) for key in keys[:2])
    q = jax.random.normal(keys[2], (B, N, G, E), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(pool[0]).astype(np.int32).reshape(sets, B, M)
    tables = [(jnp.asarray(table),) for table in order]
    length_B = jnp.full((B,), length, jnp.int32)

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        exact = (array.astype(jnp.float32) for array in arrays)
        return xla.run(*exact, tables[0][0], length_B, scale=E**-0.5, device=device)

    return Problem(
        case_id=case_id,
        first=q,
        shared=(k, v, length_B),
        sets=tables,
        reference=lambda: reference(q, k, v),  # as arguments: pages caught as constants would be copied
        least_bytes=live_bytes + 2 * q.nbytes,
        operations=4 * B * N * G * length * E,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: all tunings of the kernel and the XLA form, else only what is chosen."""
    tuning = mosaic_gpu.tuning_for(problem.first.shape[3])
    found = {"mosaic_gpu": _step(mosaic_gpu.run, device, tuning=tuning)}
    if every:
        for changes in (
            {"early_merge": True},
            {"min_pages": 2},
            {"min_pages": 8},
            {"merge_widths": (8, 2)},
            {"stages": tuning.stages - 1},
            {"parts": 132, "stages": 2 * tuning.stages},
        ):
            name = "mosaic_gpu " + " ".join(f"{key}={value}" for key, value in changes.items())
            found[name] = _step(mosaic_gpu.run, device, tuning=replace(tuning, **changes))
        found["xla"] = _step(xla.run, device)
    return found


def _step(run: Callable[..., jax.Array], device: Device, **options: Any) -> Step:
    def step(q: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        k, v, length_B = shared
        return run(q, k, v, own[0], length_B, scale=q.shape[3] ** -0.5, device=device, **options)

    return step
