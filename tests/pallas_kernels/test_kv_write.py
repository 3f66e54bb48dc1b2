"""kv_write: the XLA form against numpy, the Hopper kernel in the interpreter against it, and lowering for CUDA."""

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
from pallas_kernels.kv_write import mosaic_gpu, xla
from pallas_kernels.kv_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.kv_write.contract import KvWriteShapes, QkNorm, kv_write
from pallas_kernels.kv_write.kernel import Tuning
from pallas_kernels.kv_write.reference import dense, rope
from pallas_kernels.rotary import Rotary, layouts, pieces

H200 = Device("gpu", "9.0")
CPU = Device("cpu")
FITS = {"rows": 8, "kv_heads": 2, "group": 16, "head_dim": 128, "page_tokens": 64, "rotary": Rotary(64)}
FITS |= {"bias": True, "norm": True, "dtype": "bfloat16"}
XLA = jax.jit(xla.run, static_argnames=("rotary", "eps"))


def inputs_of(case: WriteCase) -> tuple[tuple, dict]:
    """The arrays of `run`, and its arrays by name."""
    *arrays, bias, scales = make_inputs(case, seed=0)
    return tuple(arrays), {"bias_NSE": bias, "scales_2E": scales}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_xla_form(case: WriteCase, dtype: str) -> None:
    """Queries and pools; what nobody writes stays NaN, and dropped rows reach no pool."""
    case = dataclasses.replace(case, dtype=dtype)
    k, v, *arrays, page, offset, bias, scales = make_inputs(case, seed=0)
    rows = rope(*arrays, bias, scales, rotary=case.rotary, eps=case.eps)
    inputs, extras = inputs_of(case)
    out = XLA(*inputs, **extras, rotary=case.rotary, eps=case.eps)
    pools = dense(k.astype(np.float32), v.astype(np.float32), rows[:, :, -2], rows[:, :, -1], page, offset)
    for made, expected in zip(out, (rows[:, :, :-2], *pools), strict=True):
        assert str(made.dtype) == dtype
        if np.isfinite(expected).any():
            check(np.asarray(made), expected, label=case.name)
        else:
            assert np.isnan(np.asarray(made, np.float32)).all()


@pytest.mark.parametrize(
    ("case", "tokens"),
    [*((case, 1) for case in CASES), (CASES[0], 2), (CASES[5], 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_kernel_in_the_interpreter(case: WriteCase, tokens: int) -> None:
    """The same bits as the XLA form step by step. (Under jit XLA leaves out roundings between steps.)"""
    inputs, extras = jax.tree.map(jnp.asarray, inputs_of(case))
    options = extras | {"rotary": case.rotary, "eps": case.eps}
    out = mosaic_gpu.run(*inputs, **options, tuning=Tuning(tokens), interpret=plgpu.InterpretGPUParams())
    for made, expected in zip(out, xla.run(*inputs, **options), strict=True):
        np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_lowers_for_the_gpu(case: WriteCase) -> None:
    """One kernel, whose second and third results are its pools."""
    abstract = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), inputs_of(case))
    call = jax.jit(lambda inputs, extras: mosaic_gpu.run(*inputs, **extras, rotary=case.rotary, eps=case.eps))
    text = call.trace(*abstract).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 2


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 12, 16, 40])
@pytest.mark.parametrize("rotary", [Rotary(128), Rotary(32), Rotary(16, interleaved=True)])
def test_a_row_lies_in_the_same_lanes_in_every_piece(rows: int, rotary: Rotary) -> None:
    """Or sums of a row over its pieces would be sums of different rows."""
    parts = pieces(rotary, 128)
    assert sum(part.columns for part in parts) == 128
    assert len({layout.reduce(1).to_mgpu() for layout in layouts(rows, parts)}) == 1


def test_donated_pools_are_written_in_place() -> None:
    """Two layers, written and then read: the compiled program aliases each pool and copies none."""
    inputs, extras = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs_of(CASES[0]))
    pool, _, *arrays = inputs

    def step(pools: list, qkv_TNSE: jax.Array, *rest: jax.Array) -> tuple[list, jax.Array]:
        written = []
        for pair in pools:
            q, *pair = kv_write(*pair, qkv_TNSE, *rest, **extras_of, rotary=CASES[0].rotary, device=CPU)
            qkv_TNSE = qkv_TNSE + pair[0][rest[2], :, rest[3]][:, :, None] + q.sum()
            written.append(pair)
        return written, qkv_TNSE

    extras_of = {"bias_NSE": jnp.zeros(extras["bias_NSE"].shape, jnp.bfloat16)}
    jitted = jax.jit(step, donate_argnums=0)
    text = jitted.lower([(pool, pool), (pool, pool)], *arrays).compile().as_text()
    shape = ",".join(map(str, pool.shape))
    assert not re.findall(rf"bf16\[{shape}\]\S* copy\(", text)
    assert text.split("entry_computation_layout")[0].count("may-alias") + text.count("must-alias") >= 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"head_dim": 96}, "head dimension is 96, must be 64 or 128"),
        ({"rotary": Rotary(48)}, "48 dimensions turn, must be one of 16, 32, 64, 128"),
        (
            {"kv_heads": 64, "group": 2},
            "64 kv heads with 2 query heads each are 256 values a thread, must be 160 at most",
        ),
        ({"kv_heads": 53, "group": 1}, "53 kv heads with 1 query heads each are 636 values a thread"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(KvWriteShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(KvWriteShapes(**FITS), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(KvWriteShapes(**FITS), CPU) or "")


def test_arrays_that_do_not_belong_together() -> None:
    k, v, qkv, cos, sin, page, offset, bias, scales = make_inputs(CASES[5], seed=0)
    norm = QkNorm(*scales, eps=1e-6)
    good = {"rotary": Rotary(64), "bias_NSE": bias, "norm": norm, "device": CPU}
    wrong = (
        ((k, v[1:], qkv, cos, sin, page, offset), {}, "the pools one shape"),
        ((k, v, qkv.astype(np.float32), cos, sin, page, offset), {}, "must have one dtype"),
        ((k, v, qkv[:, :, :2], cos, sin, page, offset), {}, r"must be \[T, 3, G \+ 2, 64\]"),
        ((k, v, qkv, cos[1:], sin, page, offset), {}, "cos is float32"),
        ((k, v, qkv, cos, sin.astype(np.float16), page, offset), {}, "sin is float16"),
        ((k, v, qkv, cos, sin, page[1:], offset), {}, "page .* and offset .* must be"),
        ((k, v, qkv, cos, sin, page, offset), {"bias_NSE": bias[1:]}, "bias is"),
        ((k, v, qkv, cos, sin, page, offset), {"norm": QkNorm(scales[0][1:], scales[1], 1e-6)}, "scales are"),
        ((k, v, qkv, cos, sin, page, offset), {"rotary": Rotary(65)}, "rotary dims is 65, must be even"),
    )
    for arrays, change, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            kv_write(*arrays, **good | change)
