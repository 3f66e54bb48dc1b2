"""The timed cases of mla_decode and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.mla_decode import mosaic_gpu, xla
from pallas_kernels.mla_decode.common import LATENT_DIM, PAGE_TOKENS, RANK
from pallas_kernels.timing import Problem, Step, sets_needed

# "mla_decode hHEADS bROWS kvTOKENS", or "mla_decode hHEADS sQUERY_TOKENS bROWS kvTOKENS"
CASE_IDS = (
    "mla_decode h16 b128 kv4k",
    "mla_decode h16 b16 kv1k",
    "mla_decode h16 b1 kv1k",
    "mla_decode h16 b1 kv64k",
    "mla_decode h128 b128 kv4k",
    "mla_decode h128 b16 kv4k",
    "mla_decode h128 b64 kv4k",
    "mla_decode h64 b128 kv4k",
    "mla_decode h128 b128 kv16k",
    "mla_decode h128 b16 kv16k",
    "mla_decode h16 b1 kv4k",
    "mla_decode h16 b16 kv4k",
    "mla_decode h16 b64 kv1k",
    "mla_decode h16 b64 kv4k",
    "mla_decode h16 b128 kv1k",
    "mla_decode h16 b128 kv16k",
    "mla_decode h8 s4 b128 kv4k",
    "mla_decode h16 s2 b64 kv512",
    "mla_decode h16 s4 b1 kv64k",
    "mla_decode h16 s4 b132 kv4k",
)
PATTERN = re.compile(r"mla_decode h(\d+)(?: s(\d+))? b(\d+) kv(\d+)(k?)")
_SCALE = 192**-0.5
# Tunings that are tried beside the default: for few queries a row, for many.
_FEW = (
    {"fused": False},
    {"parts": 132},
    {"min_pages": 2},
)
_MANY = (
    {"multicast": False},
    {"parts": 66},
)


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; every row has the case's length; pages in random order."""
    heads, new, rows, tokens, kilo = PATTERN.fullmatch(case_id).groups()
    H, B, length = int(heads), int(rows), int(tokens) * (1024 if kilo else 1)
    queries = (B, int(new), H) if new else (B, H)
    M = length // PAGE_TOKENS
    live_bytes = B * length * LATENT_DIM * 2
    sets = sets_needed(live_bytes)
    keys = jax.random.split(jax.random.key(0), 3)
    pool = (sets * B * M, PAGE_TOKENS, LATENT_DIM)
    latent = jax.jit(lambda key: jax.random.normal(key, pool, jnp.bfloat16))(keys[0])
    q = jax.random.normal(keys[1], (*queries, RANK), jnp.bfloat16)
    rope_q = jax.random.normal(keys[2], (*queries, LATENT_DIM - RANK), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(pool[0]).astype(np.int32).reshape(sets, B, M)
    tables = [(jnp.asarray(table),) for table in order]
    length_B = jnp.full((B,), length, jnp.int32)

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        q, rope_q, latent = (array.astype(jnp.float32) for array in arrays)
        q = jnp.concatenate([q, rope_q], axis=-1)
        return xla.run(q, latent, tables[0][0], length_B, rank=RANK, scale=_SCALE, device=device)

    return Problem(
        case_id=case_id,
        first=q,
        shared=(rope_q, latent, length_B),
        sets=tables,
        reference=lambda: reference(q, rope_q, latent),  # as arguments: pages caught as constants would be copied
        least_bytes=live_bytes + 2 * q.nbytes,
        operations=2 * B * H * int(new or 1) * length * (LATENT_DIM + RANK),
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: all tunings of the kernels and the XLA form, else only what is chosen."""
    queries = math.prod(problem.first.shape[1:-1])
    tuning = mosaic_gpu.tuning_for(queries)
    found = {"mosaic_gpu": _step(mosaic_gpu.run, device, tuning=tuning)}
    if every:
        for changes in _FEW if queries <= mosaic_gpu.FEW_QUERIES else _MANY:
            name = "mosaic_gpu " + " ".join(f"{key}={value}" for key, value in changes.items())
            found[name] = _step(mosaic_gpu.run, device, tuning=replace(tuning, **changes))
        found["xla"] = _step(xla.run, device)
    return found


def _step(run: Callable[..., jax.Array], device: Device, **options: Any) -> Step:
    def step(q: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        rope_q, latent, length_B = shared
        # Joined here and cut again by the kernels, which costs nothing: see mosaic_gpu.run.
        q = jnp.concatenate([q, rope_q], axis=-1)
        return run(q, latent, own[0], length_B, rank=RANK, scale=_SCALE, device=device, **options)

    return step
