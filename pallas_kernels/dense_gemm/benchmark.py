"""The timed cases of dense_gemm and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemm import mosaic_gpu, xla
from pallas_kernels.dense_gemm.kernel import Tuning
from pallas_kernels.device import Device
from pallas_kernels.timing import Problem, Step, sets_needed

# "dense_gemm COLUMNSxINNER mROWS": down of GLM-4-9B, Llama-2-13B, V2-Lite's first layer, and what XLA keeps
CASE_IDS = (
    "dense_gemm 4096x13696 m1",
    "dense_gemm 4096x13696 m16",
    "dense_gemm 4096x13696 m64",
    "dense_gemm 5120x13824 m16",
    "dense_gemm 5120x13824 m64",
    "dense_gemm 2048x10944 m16",
    "dense_gemm 13824x5120 m16",
    "dense_gemm 13824x5120 m64",
    "dense_gemm 27392x4096 m16",
)
PATTERN = re.compile(r"dense_gemm (\d+)x(\d+) m(\d+)")


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case. The output of each call is written over that of the one before."""
    N, K, T = _parse(case_id)
    weight_bytes = 2 * N * K
    keys = jax.random.split(jax.random.key(0), 1 + sets_needed(weight_bytes))
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    weights = [(normal(key, (N, K)) * jnp.bfloat16(K**-0.5),) for key in keys[1:]]
    x, lengths = normal(keys[0], (T, K)), jnp.arange(16, dtype=jnp.int32)

    @jax.jit
    def reference(x: jax.Array, w_NK: jax.Array) -> jax.Array:
        exact = (x.astype(jnp.float32), w_NK.astype(jnp.float32))
        return xla.run(*exact, lengths, out_dtype=jnp.dtype(jnp.float32))

    return Problem(
        case_id=case_id,
        first=jnp.zeros((T, N), jnp.bfloat16),
        shared=(x, lengths),
        sets=weights,
        reference=lambda: reference(x, weights[0][0]),
        least_bytes=weight_bytes + 2 * T * (K + N),
        operations=T * weight_bytes,
    )


def _parse(case_id: str) -> tuple[int, int, int]:
    found = PATTERN.fullmatch(case_id)
    if found is None:
        raise ValueError(f"case id is {case_id!r}, must be like {CASE_IDS[0]!r}.")
    columns, inner, rows = map(int, found.groups())
    return columns, inner, rows


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernel and the XLA form, else only what is chosen."""
    _, K, T = _parse(problem.case_id)
    found = {"mosaic_gpu": _step(None)}
    if every:
        chosen = mosaic_gpu.tuning_for(T, K)
        others = {
            "flight=96": mosaic_gpu.fitted(chosen, T, 96 << 10),
            "flight=192": mosaic_gpu.fitted(chosen, T, 192 << 10),
            "step=64": mosaic_gpu.fitted(replace(chosen, step=64), T),
            "other sides": mosaic_gpu.fitted(replace(chosen, sides=3 - chosen.sides), T),
        }
        found["xla"] = _xla
        found |= {f"mosaic_gpu {name}": _step(tuning) for name, tuning in others.items()}
    return found


def _step(tuning: Tuning | None) -> Step:
    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        x, lengths = shared
        return mosaic_gpu.run(x, own[0], lengths, out_dtype=fed.dtype, tuning=tuning, out_TN=fed)

    return step


def _xla(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
    x, lengths = shared
    # XLA would drop a call whose result nobody needs: the rows must seem to depend on the last result.
    return xla.run(x + 0 * fed[:1, :1], own[0], lengths, out_dtype=fed.dtype)
