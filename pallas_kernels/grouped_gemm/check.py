"""The correctness cases of grouped_gemm's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm import mosaic_gpu, reference
from pallas_kernels.grouped_gemm.cases import GemmCase, GemmInputs, make_inputs
from pallas_kernels.grouped_gemm.kernel import BLOCK, STEP, Tuning
from pallas_kernels.grouped_gemm.mosaic_gpu import MANY_ROWS

_TWO = {"even": (256, 256), "odd": (257, 255), "one": (512, 0)}
_MANY = (0, 1, 7, 8, 9, 0, 0, 63, 64, 65, 127, 128, 129, 0, 300, 15, 16, 17, 0, 144, 145, 2, 3)
_FEW = (1, 0, 0, 2, 0, 0, 0, 0, 1)
VARIANTS = {
    "chosen": None,
    "narrow": Tuning(rows=16),
    "narrow, 1 block": Tuning(rows=24, blocks=1),
    "wide": Tuning(rows=128, stagger=0),
    "classes": Tuning(rows=144, widths=(64, 128), store_rows=72),
    "widest": Tuning(rows=192, widths=(128, 160), store_rows=96, stagger=2),
    "plain stores": Tuning(rows=64, swizzled_stores=False),
    "long steps": Tuning(rows=32, step=128),
    "queue, low tiles": replace(MANY_ROWS, rows=48, widths=(8, 16, 32), stagger=2),
    "queue, 144 rows": replace(MANY_ROWS, rows=144, widths=(64, 96, 112, 128), store_rows=72),
    "queue, 192 rows": replace(MANY_ROWS, rows=192, widths=(64, 128, 160, 176), store_rows=192),
    "queue, shuffles": replace(MANY_ROWS, matrix_stores=False, late=1),
}


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for name, sizes in _TWO.items():
        for columns in (128, 160, 192, 256, 1408, 2048):
            # One case for gate_up and one for down: the other product of each has fewer columns than the kernel takes.
            for case in (
                GemmCase(f"b147 {name} n{columns}", sizes, 0, 64, columns, "bfloat16"),
                GemmCase(f"b147 {name} d{columns}", sizes, 0, columns, 64, "bfloat16"),
            ):
                yield from _both(case, device, ("chosen",))
    yield from _both(GemmCase("b147 nobody", (0,) * 256, 512, 128, 128, "bfloat16"), device, ("chosen",))
    yield from _both(GemmCase("few of 9", _FEW, 0, 1024, 704, "bfloat16"), device, ("chosen",))
    yield from _both(GemmCase("few of 9, unused rows", _FEW, 11, 256, 704, "bfloat16"), device, ("chosen",))
    yield from _both(GemmCase("borders", _MANY, 77, 512, 704, "bfloat16"), device, VARIANTS)
    rng = np.random.default_rng(3)
    for rows in (384, 3072, 12288):
        sizes = tuple(int(n) for n in rng.multinomial(rows, np.ones(64) / 64))
        yield from _both(GemmCase(f"64 experts m{rows}", sizes, 0, 256, 384, "bfloat16"), device, ("chosen",))


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _both(
    case: GemmCase, device: Device, variants: Iterable[str]
) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    inputs = make_inputs(case, seed=0)
    live = sum(case.sizes)
    for variant in variants:
        tuning = VARIANTS[variant]
        for name, inner, columns in (("gate_up", case.hidden, case.width), ("down", case.width, case.hidden)):
            blocks, step = (tuning.blocks, tuning.step) if tuning else (2, STEP)
            if inner % step or columns < BLOCK or (name == "gate_up" and blocks == 1):
                continue
            made = tuning and mosaic_gpu.fitted(tuning)
            yield f"{case.name} {name} {variant}", _runner(name, inputs, live, device, made)


def _runner(
    name: str, inputs: GemmInputs, live: int, device: Device, tuning: Tuning | None
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    x_TD, row_A, w_X2FD, size_X, h_AF, w_XDF, weight_A = inputs
    options = {"device": device, "tuning": tuning}
    if name == "gate_up":
        expected = reference.gate_up(x_TD, row_A[:live], w_X2FD, size_X)
        arrays, options = (x_TD, w_X2FD, size_X), options | {"row_A": jnp.asarray(row_A), "weight_A": None}
    else:
        expected = reference.down(h_AF, w_XDF, size_X, weight_A)
        arrays = (h_AF, w_XDF[:, None], size_X)
        options |= {"row_A": None, "weight_A": jnp.asarray(weight_A)}
    shape = (len(row_A), arrays[1].shape[2])

    @jax.jit
    def twice(x: jax.Array, w_XPNK: jax.Array, size_X: jax.Array) -> jax.Array:
        # As two layers: the second call finds the queue's words as the first one has left them.
        poison = jnp.full(shape, jnp.nan, jnp.bfloat16)
        first = mosaic_gpu.run(x, w_XPNK, size_X, out_AN=poison, **options)
        return mosaic_gpu.run(x + 0 * first[:1, :1], w_XPNK, size_X, out_AN=poison, **options)

    def call() -> tuple[np.ndarray, np.ndarray]:
        made = twice(*map(jnp.asarray, arrays))
        return np.asarray(jax.block_until_ready(made)[:live], np.float32), expected

    return call
