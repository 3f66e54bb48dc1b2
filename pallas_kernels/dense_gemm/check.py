"""The correctness cases of dense_gemm's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compare import Difference
from pallas_kernels.dense_gemm import mosaic_gpu, reference
from pallas_kernels.dense_gemm.cases import DenseCase, block, make_inputs, one
from pallas_kernels.dense_gemm.contract import X
from pallas_kernels.dense_gemm.kernel import Tuning
from pallas_kernels.device import Device

# A row of products rounds between them: its error is that of several products.
_NORM, _ELEMENT = 8e-3, 2e-2
CASES = (
    one("one token", 1, 1408, 2048),
    one("fewer units than CTAs", 1, 128, 320),
    one("half a tile", 16, 576, 2048),
    one("tiles over many CTAs", 8, 2048, 11264, residual=X),
    one("3 tokens", 3, 3648, 2048, bias=True, residual=X),
    one("whole tiles", 16, 34048, 256),
    one("gate and up", 16, 1408, 2048, gated=True),
    one("64 tokens", 64, 3648, 2048, bias=True, residual=X),
    one("64 tokens, gate and up", 64, 2816, 1024, gated=True),
    one("128 tokens", 128, 2048, 1408),
    one("exact", 3, 3648, 2048, exact=True),
    DenseCase("block m1", 1, *block(2048, 2048, 1408, 128, 3648)),
    DenseCase("block m16", 16, *block(2048, 2048, 11264, 128, 3648)),
    DenseCase("block m40", 40, *block(1024, 2048, 2816, 128, 1536)),
)


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for case in CASES:
        yield case.name, _runner(case, device, None)
    yield "gate and up, 4 slots", _runner(CASES[6], device, Tuning(slots=4, token_slots=2))
    yield "block m16, two blocks", _runner(CASES[12], device, Tuning(slots=8, token_slots=4, blocks=2))


def passes(found: Difference) -> bool:
    """Within the bounds, and NaN or Inf nowhere."""
    return found.norm <= _NORM and found.element <= _ELEMENT and not found.bad


def _runner(case: DenseCase, device: Device, tuning: Tuning | None) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    @functools.cache
    def given() -> tuple[dict[str, jax.Array], np.ndarray]:
        arrays = make_inputs(case, seed=0)
        expected = np.concatenate(reference.dense_chain(case.stages, arrays), axis=1)
        return {name: jnp.asarray(array) for name, array in arrays.items()}, expected

    def call() -> tuple[np.ndarray, np.ndarray]:
        arrays, expected = given()
        dtype = jnp.float32 if case.stages[-1].exact else jnp.bfloat16
        poison = jnp.full((case.tokens, case.sizes[-1][0]), jnp.nan, dtype)
        out = mosaic_gpu.run(case.stages, arrays, device=device, tuning=tuning, out_TN=poison)
        return np.asarray(jax.block_until_ready(jnp.concatenate(out, axis=1)), np.float32), expected

    return call
