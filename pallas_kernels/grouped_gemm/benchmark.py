"""The timed cases of grouped_gemm and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm import mosaic_gpu, xla
from pallas_kernels.grouped_gemm.kernel import Tuning
from pallas_kernels.timing import Problem, Step, sets_needed

# "grouped_gemm EXPERTSxINNERxCOLUMNS mROWS [uneven] [gate_up|down]": rows shared out evenly, or as a router that
# chooses at random would; one plain product, or what an MoE layer asks for. gate_up gathers from as many tokens.
CASE_IDS = (
    "grouped_gemm 64x2048x1408 m384",
    "grouped_gemm 64x2048x1408 m3072",
    "grouped_gemm 64x2048x1408 m24576",
    "grouped_gemm 64x2048x1408 m384 uneven",
    "grouped_gemm 64x2048x1408 m3072 uneven",
    "grouped_gemm 64x2048x1408 m24576 uneven",
    "grouped_gemm 64x2048x1408 m8 gate_up",
    "grouped_gemm 64x1408x2048 m8 down",
    "grouped_gemm 64x2048x1408 m96 uneven gate_up",
    "grouped_gemm 64x1408x2048 m96 uneven down",
    "grouped_gemm 64x2048x1408 m49152 uneven gate_up",
    "grouped_gemm 64x1408x2048 m49152 uneven down",
)
PATTERN = re.compile(r"grouped_gemm (\d+)x(\d+)x(\d+) m(\d+)( uneven)?(?: (gate_up|down))?")


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case. The output of each call is written over that of the one before."""
    (X, K, N, A), uneven, part = _parse(case_id)
    P = 2 if part == "gate_up" else 1
    rng = np.random.default_rng(0)
    even = np.full(X, A // X) + (np.arange(X) < A % X)
    sizes = rng.multinomial(A, np.ones(X) / X) if uneven else even
    touched_bytes = int((sizes > 0).sum()) * P * N * K * 2
    keys = jax.random.split(jax.random.key(0), 2 + sets_needed(touched_bytes))
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    weights = [(normal(key, (X, P, N, K)) * K**-0.5,) for key in keys[2:]]
    x = normal(keys[0], (A, K))
    shared = (x, jnp.asarray(sizes, jnp.int32))
    shared += (jnp.asarray(rng.permutation(A), jnp.int32),) if P == 2 else ()
    shared += (jax.random.uniform(keys[1], (A,), jnp.float32),) if part == "down" else ()
    options = _options(part, shared[2:])

    @jax.jit
    def reference(x: jax.Array, w_XPNK: jax.Array) -> jax.Array:
        exact = (x.astype(jnp.float32), w_XPNK.astype(jnp.float32))
        return xla.run(*exact, shared[1], device=device, **options)

    return Problem(
        case_id=case_id,
        first=jnp.zeros((A, N), jnp.bfloat16),
        shared=shared,
        sets=weights,
        reference=lambda: reference(x, weights[0][0]),
        least_bytes=touched_bytes + 2 * A * (K + N),
        operations=2 * A * K * N * P,
    )


def _parse(case_id: str) -> tuple[tuple[int, ...], bool, str | None]:
    found = PATTERN.fullmatch(case_id)
    if found is None:
        raise ValueError(f"case id is {case_id!r}, must be like {CASE_IDS[0]!r} or {CASE_IDS[-1]!r}.")
    *numbers, uneven, part = found.groups()
    return tuple(map(int, numbers)), bool(uneven), part


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernel and the XLA form, else only what is chosen."""
    _, _, part = _parse(problem.case_id)
    X, P, _, K = problem.sets[0][0].shape
    chosen = mosaic_gpu.tuning_for(problem.first.shape[0], X, P)
    found = {"mosaic_gpu": _step(part, device, chosen)}
    if every:
        for name, tuning in _others(chosen, P, K).items():
            found[f"mosaic_gpu {name}"] = _step(part, device, tuning)
        found["xla"] = _step(part, device, None)
    return found


def _others(chosen: Tuning, products: int, inner: int) -> dict[str, Tuning]:
    """Tunings to try beside the chosen one."""
    if chosen.queue:
        high = (64, 96, 112, 128, 136, 144, 152, 160, 168, 176, 184)
        made = {
            "shares rows=144": Tuning(rows=144, widths=(64, 128), store_rows=72),  # chosen before there was a queue
            "shares rows=128": replace(chosen, queue=False),
            "shuffles": replace(chosen, matrix_stores=False),
            "stagger=0": replace(chosen, stagger=0),
            "stagger=2": replace(chosen, stagger=2),
            "late=2": replace(chosen, late=2),
            "late=12": replace(chosen, late=12),
            "rows=144": replace(chosen, rows=144, widths=(64, 96, 104, 112, 120, 128, 136), store_rows=72),
            "rows=192": replace(chosen, rows=192, widths=high, store_rows=192),
        }
    else:
        made = {
            "blocks=1": replace(chosen, blocks=1),
            "blocks=2": replace(chosen, blocks=2),
            "blocks=2 step=128": replace(chosen, blocks=2, step=128),
            "blocks=1 step=128": replace(chosen, blocks=1, step=128),
            "stagger=0": replace(chosen, stagger=0),
            "rows+16": replace(chosen, rows=chosen.rows + 16),
        }
    fits = {name: one for name, one in made.items() if products <= one.blocks and inner % one.step == 0}
    return {name: mosaic_gpu.fitted(one) for name, one in fits.items()}


def _options(part: str | None, last: tuple[jax.Array, ...]) -> dict[str, Any]:
    return {"row_A": last[0] if part == "gate_up" else None, "weight_A": last[0] if part == "down" else None}


def _step(part: str | None, device: Device, tuning: Tuning | None) -> Step:
    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        x, size_X, *last = shared
        if part == "gate_up":
            # Else XLA would gather the rows once for all calls.
            last = [last[0] + (0 * fed[0, 0]).astype(jnp.int32)]
        options: dict[str, Any] = _options(part, tuple(last)) | {"device": device}
        if tuning is None:
            # XLA would drop a call whose result nobody needs: the rows must seem to depend on the last result.
            return xla.run(x + 0 * fed[:1, :1], own[0], size_X, **options)
        return mosaic_gpu.run(x, own[0], size_X, out_AN=fed, tuning=tuning, **options)

    return step
