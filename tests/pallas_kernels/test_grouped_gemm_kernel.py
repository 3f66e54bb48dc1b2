"""grouped_gemm's Hopper kernel without a GPU: numbers in the interpreter, lowering for CUDA, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm import mosaic_gpu, reference
from pallas_kernels.grouped_gemm.cases import GemmCase, make_inputs
from pallas_kernels.grouped_gemm.contract import GroupedGemmShapes
from pallas_kernels.grouped_gemm.kernel import Tuning

H200 = Device("gpu", "9.0")
FITS = {"rows": 96, "experts": 64, "products": 2, "inner": 2048, "columns": 1408, "dtype": "bfloat16"}
# No rows, one, a whole tile, more than one tile, borders inside groups of 8; the ninth expert opens a second walk.
SIZES = (3, 0, 17, 1, 0, 0, 40, 8, 5)
UNEVEN = Tuning(rows=32, widths=(8, 16), stages=3, store_rows=24, ctas=2)
LONG = Tuning(rows=24, stages=2, step=128, stagger=2, ctas=3)
# As many stages as steps at most, and the next tile taken before the first step of one.
QUEUE = Tuning(rows=32, widths=(8, 16, 24), stages=3, queue=True, matrix_stores=True, ctas=2)


@pytest.mark.parametrize(
    ("width", "hidden", "tuning"),
    [(192, 128, UNEVEN), (128, 128, LONG), (192, 256, QUEUE)],
    ids=["moved-up columns", "long steps", "queue"],
)
def test_gate_up_in_the_interpreter(width: int, hidden: int, tuning: Tuning) -> None:
    """The output is full of NaN before, so that a row that is not written is seen."""
    inputs = make_inputs(GemmCase("", SIZES, 6, hidden, width, "bfloat16"), seed=0)
    x_TD, row_A, w_X2FD, size_X, *_ = map(jnp.asarray, inputs)
    poison = jnp.full((len(row_A), width), jnp.nan, jnp.bfloat16)
    options = {"device": H200, "tuning": tuning, "interpret": plgpu.InterpretGPUParams()}
    out = mosaic_gpu.run(x_TD, w_X2FD, size_X, row_A=row_A, weight_A=None, out_AN=poison, **options)
    live = sum(SIZES)
    expected = reference.gate_up(inputs.x_TD, inputs.row_A[:live], inputs.w_X2FD, inputs.size_X)
    check(np.asarray(out)[:live], expected)


@pytest.mark.parametrize(
    ("hidden", "tuning"),
    [
        (384, UNEVEN),
        (128, Tuning(rows=48, stages=2, blocks=1, stagger=0, ctas=2)),
        (384, QUEUE),
        (128, replace(QUEUE, ctas=3)),
        (256, replace(QUEUE, rows=16, widths=())),
    ],
    ids=["uneven", "1 block", "queue, uneven", "queue, no tile of two blocks", "queue, whole tiles"],
)
def test_down_in_the_interpreter(hidden: int, tuning: Tuning) -> None:
    """384 columns are a tile of two blocks and one of a single block."""
    inputs = make_inputs(GemmCase("", SIZES, 3, hidden, 64, "bfloat16"), seed=1)
    *_, size_X, h_AF, w_XDF, weight_A = map(jnp.asarray, inputs)
    options = {"device": H200, "tuning": tuning, "interpret": plgpu.InterpretGPUParams()}
    out = mosaic_gpu.run(h_AF, w_XDF[:, None], size_X, row_A=None, weight_A=weight_A, **options)
    check(np.asarray(out)[: sum(SIZES)], reference.down(inputs.h_AF, inputs.w_XDF, inputs.size_X, inputs.weight_A))


@pytest.mark.parametrize(
    ("rows", "experts", "products", "inner", "columns"),
    [(6, 64, 2, 2048, 1408), (384, 64, 1, 1408, 2048), (24576, 64, 1, 2048, 1408), (1024, 32, 2, 7168, 2048)],
)
def test_it_lowers_for_the_gpu(rows: int, experts: int, products: int, inner: int, columns: int) -> None:
    """Shapes, layouts and shared memory of the chosen tuning are checked by the lowering, which needs no GPU."""
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((experts, products, columns, inner), jnp.bfloat16)
    size, weight = jax.ShapeDtypeStruct((experts,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    call = jax.jit(lambda x, w, size, weight: mosaic_gpu.run(x, w, size, row_A=None, weight_A=weight, device=H200))
    text = call.trace(x, w, size, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"inner": 96}, "the inner dimension is 96, must be a multiple of 64"),
        ({"columns": 64}, "the product has 64 columns, must be a multiple of 8 and 128 at least"),
        ({"columns": 1412}, "the product has 1412 columns"),
        ({"rows": 0}, "there are no rows"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(GroupedGemmShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(GroupedGemmShapes(**FITS), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(GroupedGemmShapes(**FITS), Device("cpu")) or "")


@pytest.mark.parametrize(("rows", "tall"), [(6, 8), (96, 16), (384, 24), (3072, 72), (24576, 128)])
def test_tiles_hold_an_experts_share_and_its_spread(rows: int, tall: int) -> None:
    assert mosaic_gpu.tuning_for(rows, 64, 1).rows == tall
