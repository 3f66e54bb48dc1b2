"""The timed cases of sampling and their data on the device: takes a case id, gives a problem and its variants.

Rows are softmax(normal numbers), the rival's kind of data: flat, so that top_p alone keeps a large part of a row. Each
call draws its uniform numbers from the tokens of the one before: a small kernel between two calls, timed with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.sampling import mosaic_gpu, xla
from pallas_kernels.sampling.common import Tuning
from pallas_kernels.sampling.reference import sort_based
from pallas_kernels.timing import Problem, Step, sets_needed

TOP_K, TOP_P = 50, 0.9
# "sampling FILTERS vVOCABULARY bROWS [peaked]"; peaked: logits six times as wide, as those of a model that is sure.
CASE_IDS = (
    "sampling topk_topp v151552 b64",
    "sampling topk_topp v151552 b256",
    "sampling topk_topp v151552 b1",
    "sampling topk_topp v151552 b16",
    "sampling topk_topp v154880 b64",
    "sampling topp v151552 b64 peaked",
    "sampling topp v151552 b64",
    "sampling topp v151552 b256",
    "sampling draw v151552 b256",
)
PATTERN = re.compile(r"sampling (topk_topp|topp|draw) v(\d+) b(\d+)( peaked)?")


def build(case_id: str, device: Device) -> Problem:
    """Random rows for a case."""
    match = PATTERN.fullmatch(case_id)
    if match is None:
        raise ValueError(f"{case_id!r} is no case of sampling, must be like {CASE_IDS[0]!r}.")
    filters, vocab, rows, peaked = match.groups()
    B, V, width = int(rows), int(vocab), 6.0 if peaked else 1.0
    live_bytes = B * V * 4
    make = jax.jit(lambda key: jax.nn.softmax(width * jax.random.normal(key, (B, V), jnp.float32)))
    sets = [(make(jax.random.key(i)),) for i in range(sets_needed(live_bytes))]
    first = jax.random.randint(jax.random.key(99), (B,), 0, V, jnp.int32)
    top_k_B = jnp.full((B,), TOP_K if filters == "topk_topp" else 0, jnp.int32)
    top_p_B = jnp.full((B,), 1.0 if filters == "draw" else TOP_P, jnp.float32)
    shared = (top_k_B, top_p_B, jnp.zeros((B,), jnp.float32))

    def reference() -> jax.Array:
        arrays = [np.asarray(array) for array in (sets[0][0], _uniform(first), *shared)]
        return jnp.asarray(sort_based(*arrays)[0])

    return Problem(
        case_id=case_id,
        first=first,
        shared=shared,
        sets=sets,
        reference=reference,
        least_bytes=live_bytes,
        operations=live_bytes,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings and the XLA form, else only what is chosen."""
    found = {"mosaic_gpu": _step(mosaic_gpu.run, device, tuning=Tuning())}
    if every:
        for changes in ({"tiles": 1}, {"guess": 512}, {"stages": 6}):
            name = "mosaic_gpu " + " ".join(f"{key}={value}" for key, value in changes.items())
            found[name] = _step(mosaic_gpu.run, device, tuning=replace(Tuning(), **changes))
        found["xla"] = _step(xla.run, device)
    return found


def _uniform(token_B: jax.Array) -> jax.Array:
    """A number in [0, 1) that hangs on a token."""
    return ((token_B * 40503 + 12345) & 0xFFFF).astype(jnp.float32) / 65536


def _step(run: Callable[..., tuple[jax.Array, jax.Array]], device: Device, **options: Any) -> Step:
    def step(token_B: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        # What is read hangs on the call before, too: else XLA makes the statistics of equal rows once for all calls.
        x_BV, token_B = lax.optimization_barrier((own[0], token_B))
        return run(x_BV, _uniform(token_B), *shared, device=device, **options)[0]

    return step
