"""dense_gemm's Hopper kernel without a GPU: numbers in the interpreter, lowering for CUDA, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.dense_gemm import mosaic_gpu, reference
from pallas_kernels.dense_gemm.cases import DenseCase, make_inputs
from pallas_kernels.dense_gemm.contract import DenseGemmShapes
from pallas_kernels.dense_gemm.kernel import Tuning
from pallas_kernels.device import Device

H200 = Device("gpu", "9.0")
FITS = {"rows": 16, "inner": 13696, "columns": 4096, "dtype": "bfloat16", "out_dtype": "float32"}


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (DenseCase("parts of unequal length", 5, 256, 384), Tuning(ctas=3, step=64, stages=3)),
        (DenseCase("two tiles of a CTA", 16, 512, 256), Tuning(ctas=2, step=128, stages=2)),
        (DenseCase("many parts, fp32", 8, 128, 640, out_dtype="float32"), Tuning(ctas=3, step=64, stages=2, sides=1)),
        (DenseCase("24 rows", 24, 256, 192), Tuning(ctas=2, step=64, stages=2)),
    ],
    ids=lambda value: value.name if isinstance(value, DenseCase) else "",
)
def test_numbers_in_the_interpreter(case: DenseCase, tuning: Tuning) -> None:
    """The output is full of NaN before, so that a column that is not written is seen."""
    inputs = make_inputs(DenseCase("", case.rows, case.columns, case.inner, "bfloat16"), seed=0)
    dtype = jnp.dtype(case.out_dtype or "bfloat16")
    options = {"tuning": tuning, "interpret": plgpu.InterpretGPUParams(), "out_dtype": dtype}
    poison = jnp.full((case.rows, case.columns), jnp.nan, dtype)
    out = mosaic_gpu.run(*map(jnp.asarray, inputs), jnp.arange(3, dtype=jnp.int32), out_TN=poison, **options)
    assert out.dtype == dtype
    check(np.asarray(out), reference.dense(*inputs))


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("columns", "inner"), [(4096, 13696), (5120, 13824), (2048, 10944)])
def test_it_lowers_for_the_gpu(rows: int, columns: int, inner: int) -> None:
    """Shapes, layouts and shared memory of the chosen tuning are checked by the lowering, which needs no GPU."""
    x, w = (jax.ShapeDtypeStruct((n, inner), jnp.bfloat16) for n in (rows, columns))
    lengths = jax.ShapeDtypeStruct((16,), jnp.int32)
    call = jax.jit(lambda x, w, n: mosaic_gpu.run(x, w, n, out_dtype=jnp.dtype("float32")))
    text = call.trace(x, w, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"rows": 65}, "there are 65 rows, must be 64 at most"),
        ({"inner": 8064}, "the sums have 8064 terms, must have 8192 at least"),
        ({"inner": 8224}, "the weight is 4096 x 8224, must be multiples of 128 and 64"),
        ({"columns": 4160}, "the weight is 4160 x 13696"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(DenseGemmShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(DenseGemmShapes(**FITS), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(DenseGemmShapes(**FITS), Device("cpu")) or "")


def test_a_tuning_that_does_not_divide_the_weight() -> None:
    with pytest.raises(ValueError, match="the weight is 192 x 128, must be multiples of 128 and 128"):
        mosaic_gpu.shares_for(Tuning(), 192, 128)
