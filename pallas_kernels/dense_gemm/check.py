"""The correctness cases of dense_gemm's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.dense_gemm import mosaic_gpu
from pallas_kernels.dense_gemm.cases import DenseCase, make_inputs
from pallas_kernels.dense_gemm.kernel import Tuning
from pallas_kernels.dense_gemm.reference import dense
from pallas_kernels.device import Device

_CALLS = 6  # of a program: each must leave the words as it found them
_ROWS = (1, 8, 16, 24, 32, 48, 64)
TUNINGS = {
    "narrow steps": Tuning(step=64, stages=8),
    "few CTAs": Tuning(ctas=5, stages=4),
    "two stages": Tuning(stages=2),
    "two CTAs an SM": Tuning(sides=1, ctas=264, stages=3),
}


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for rows in _ROWS:
        yield _check(DenseCase(f"m{rows}", rows, 1536, 2048, dtype="bfloat16"))
    for rows in (16, 64):
        yield _check(DenseCase(f"m{rows} 4096x13696", rows, 4096, 13696, dtype="bfloat16"))
        yield _check(DenseCase(f"m{rows} 2048x10944", rows, 2048, 10944, dtype="bfloat16"))
        yield _check(DenseCase(f"m{rows} fp32", rows, 26624, 1024, dtype="bfloat16", out_dtype="float32"))
        for name, tuning in TUNINGS.items():
            yield _check(DenseCase(f"m{rows} {name}", rows, 2176, 1152, dtype="bfloat16"), tuning)


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _check(case: DenseCase, tuning: Tuning | None = None) -> tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    @functools.cache
    def prepared() -> tuple[Callable[[], jax.Array], np.ndarray]:
        inputs = make_inputs(case, seed=0)
        return functools.partial(_repeated(case, tuning), *jax.device_put(tuple(inputs))), dense(*inputs)

    def run() -> tuple[np.ndarray, np.ndarray]:
        call, expected = prepared()
        return np.asarray(call(), np.float32), expected

    return case.name, run


def _repeated(case: DenseCase, tuning: Tuning | None) -> Callable[..., jax.Array]:
    """Several calls in a row that share words; NaN where they differ, as the timing of CTAs must not matter."""
    dtype = jnp.dtype(case.out_dtype or case.dtype)

    @jax.jit
    def call(x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
        lengths_B = (x_TK[:, 0] > 0).astype(jnp.int32)
        first = None
        out = jnp.full((case.rows, case.columns), jnp.nan, dtype)
        for _ in range(_CALLS):
            # NaN, but not known to be: each call needs what the one before gave, as the words ask for.
            given = jnp.where(out > 1e30, out, jnp.nan)
            out = mosaic_gpu.run(x_TK, w_NK, lengths_B, out_TN=given, out_dtype=dtype, tuning=tuning)
            first = out if first is None else jnp.where(first == out, first, jnp.nan)
        assert first is not None
        return first

    return call
