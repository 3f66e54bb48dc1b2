"""The timed cases of gqa_prefill and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill import mosaic_gpu, xla
from pallas_kernels.gqa_prefill.kernel import Tuning
from pallas_kernels.timing import Problem, Step, sets_needed

# "gqa_prefill HEADS/KV_HEADS bREQUESTS qTOKENS kvTOKENS": each request's last qTOKENS of kvTOKENS; head dimension 128.
CASE_IDS = (
    "gqa_prefill 32/2 b8 q1024 kv8k",
    "gqa_prefill 32/2 b1 q4096 kv4k",
    "gqa_prefill 32/2 b1 q16384 kv16k",
    "gqa_prefill 32/2 b16 q512 kv4k",
    "gqa_prefill 32/32 b4 q2048 kv2k",
)
PATTERN = re.compile(r"gqa_prefill (\d+)/(\d+) b(\d+) q(\d+) kv(\d+)k")
_HEAD_DIM = 128


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; pages in random order."""
    heads, N, R, queries, kilo = (int(number) for number in PATTERN.fullmatch(case_id).groups())
    E, G, length = _HEAD_DIM, heads // N, kilo * 1024
    M = length // mosaic_gpu.PAGE_TOKENS
    live_bytes = 2 * R * length * N * E * 2
    sets = sets_needed(live_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (sets * R * M, N, mosaic_gpu.PAGE_TOKENS, E)
    k, v = (jax.jit(lambda key: jax.random.normal(key, pool, jnp.bfloat16))(key) for key in keys[:2])
    q = jax.random.normal(keys[2], (R * queries, N, G, E), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(pool[0]).astype(np.int32).reshape(sets, R, M)
    tables = [(jnp.asarray(table),) for table in order]
    start_R = jnp.arange(R, dtype=jnp.int32) * queries
    borders = (start_R, jnp.full((R,), queries, jnp.int32), jnp.full((R,), length - queries, jnp.int32))

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        exact = (array.astype(jnp.float32) for array in arrays)
        return xla.run(*exact, tables[0][0], *borders, scale=E**-0.5, device=device)

    pairs = R * (queries * (length - queries) + queries * (queries + 1) // 2)
    return Problem(
        case_id=case_id,
        first=q,
        shared=(k, v, *borders),
        sets=tables,
        reference=lambda: reference(q, k, v),  # as arguments: pages caught as constants would be copied
        least_bytes=live_bytes + 2 * q.nbytes,
        operations=4 * heads * E * pairs,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: all tunings of the kernel and the XLA form, else only what is chosen."""
    found = {"mosaic_gpu": _step(mosaic_gpu.run, device)}
    if every:
        for name, tuning in {
            "no turns": Tuning(turns=False),
            "one page": Tuning(pages=1, stages=4),
        }.items():
            found[f"mosaic_gpu {name}"] = _step(mosaic_gpu.run, device, tuning=tuning)
        found["xla"] = _step(xla.run, device)
    return found


def _step(run: Callable[..., jax.Array], device: Device, **options: Any) -> Step:
    def step(q: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        k, v, *borders = shared
        return run(q, k, v, own[0], *borders, scale=q.shape[3] ** -0.5, device=device, **options)

    return step
