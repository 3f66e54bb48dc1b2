"""latent_write: the XLA form against numpy, the Hopper kernel in the interpreter against it, lowering for CUDA."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.latent_write import mosaic_gpu, xla
from pallas_kernels.latent_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.latent_write.contract import LatentWriteShapes, latent_write
from pallas_kernels.latent_write.kernel import Tuning
from pallas_kernels.latent_write.reference import dense, rope
from pallas_kernels.rotary import Rotary

H200 = Device("gpu", "9.0")
CPU = Device("cpu")
FITS = {"rows": 8, "heads": 16, "head_dim": 192, "width": 2112, "rank": 512, "page_tokens": 64}
FITS |= {"rotary": Rotary(64, interleaved=True), "dtype": "bfloat16"}
XLA = jax.jit(xla.run, static_argnames=("rotary", "eps"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_xla_form(case: WriteCase, dtype: str) -> None:
    """Queries and pool; what nobody writes stays NaN, and dropped rows do not reach it."""
    inputs = make_inputs(dataclasses.replace(case, dtype=dtype), seed=0)
    pool, *arrays, page, offset = inputs
    turned, rows = rope(*arrays, rotary=case.rotary, eps=case.eps)
    out = XLA(*inputs, rotary=case.rotary, eps=case.eps)
    check(np.asarray(out[0]), turned, label=case.name)
    written = dense(pool.astype(np.float32), rows, page, offset)
    if np.isfinite(written).any():
        check(np.asarray(out[1]), written, label=case.name)
    else:
        assert np.isnan(np.asarray(out[1], np.float32)).all()


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_in_the_interpreter(case: WriteCase, tokens: int) -> None:
    """The same bits as the XLA form step by step. (Under jit XLA leaves out roundings between steps.)"""
    inputs = [jnp.asarray(array) for array in make_inputs(case, seed=0)]
    options = {"tuning": Tuning(tokens), "interpret": plgpu.InterpretGPUParams()}
    out = mosaic_gpu.run(*inputs, rotary=case.rotary, eps=case.eps, **options)
    for made, expected in zip(out, xla.run(*inputs, rotary=case.rotary, eps=case.eps), strict=True):
        np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_lowers_for_the_gpu(case: WriteCase, tokens: int) -> None:
    """One kernel, whose second result is its pool."""
    inputs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in make_inputs(case, seed=0)]
    options = {"rotary": case.rotary, "eps": case.eps, "tuning": Tuning(tokens)}
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, **options))
    text = call.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 1


def test_a_donated_pool_is_written_in_place() -> None:
    """Two layers, written and then read: the compiled program aliases each pool and copies none."""
    case = CASES[0]
    pool, *arrays = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in make_inputs(case, seed=0))

    def step(pools: list, down_TW: jax.Array, *rest: jax.Array) -> tuple[list, jax.Array]:
        written = []
        for latent_PKL in pools:
            q, latent_PKL = latent_write(latent_PKL, down_TW, *rest, rotary=case.rotary, eps=case.eps, device=CPU)
            down_TW = down_TW + latent_PKL[rest[4], rest[5]] + q.sum()
            written.append(latent_PKL)
        return written, down_TW

    text = jax.jit(step, donate_argnums=0).lower([pool, pool], *arrays).compile().as_text()
    shape = ",".join(map(str, pool.shape))
    assert not re.findall(rf"bf16\[{shape}\]\S* copy\(", text)
    assert text.split("entry_computation_layout")[0].count("may-alias") + text.count("must-alias") >= 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"rank": 384}, "the latent has 384 dimensions, must be one of 256, 512, 1024"),
        ({"rotary": Rotary(16)}, "16 dimensions turn, must be one of 32, 64"),
        ({"head_dim": 190}, "queries of 190 and rows of 2112 dimensions, must be multiples of 8"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(LatentWriteShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(LatentWriteShapes(**FITS), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(LatentWriteShapes(**FITS), CPU) or "")


def test_arrays_that_do_not_belong_together() -> None:
    pool, down, scale, q, cos, sin, page, offset = make_inputs(CASES[0], seed=0)
    good = {"rotary": Rotary(64, interleaved=True), "eps": 1e-6, "device": CPU}
    wrong = (
        ((pool, down.astype(np.float32), scale, q, cos, sin, page, offset), {}, "must have one dtype"),
        ((pool, down, scale[1:], q, cos, sin, page, offset), {}, "64 dimensions turn, must be the pool's 576 less 511"),
        ((pool, down[:, 1:], scale, q, cos, sin, page, offset), {}, r"must be \[5, 576 or more\]"),
        ((pool, down, scale, q[1:], cos, sin, page, offset), {}, r"must be \[4, 576 or more\]"),
        ((pool, down, scale, q[:, :, :32], cos, sin, page, offset), {}, "from 2 to the head's 32"),
        ((pool, down, scale, q, cos[:, 1:], sin, page, offset), {}, "cos is float32"),
        ((pool, down, scale, q, cos, sin, page, offset[1:]), {}, "page .* and offset .* must be"),
    )
    for arrays, change, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            latent_write(*arrays, **good | change)
