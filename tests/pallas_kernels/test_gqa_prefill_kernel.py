"""gqa_prefill's Hopper kernel without a GPU: the work list, the numbers in the interpreter, and lowering for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill import mosaic_gpu
from pallas_kernels.gqa_prefill.cases import PrefillCase, make_inputs
from pallas_kernels.gqa_prefill.contract import GqaPrefillShapes
from pallas_kernels.gqa_prefill.kernel import Tuning
from pallas_kernels.gqa_prefill.reference import dense

H200 = Device("gpu", "9.0")
SHORT = PrefillCase("short", 60, ((2, 0, 17), (0, 70, 33), (1, 63, 1)), 1, 2, 64, 64, "bfloat16")
LONGER = PrefillCase("longer", 200, ((2, 0, 140), (0, 300, 33), (1, 63, 1)), 1, 1, 128, 64, "bfloat16")


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # stale keys are NaN, by intent
@pytest.mark.parametrize("case", [SHORT, LONGER], ids=lambda case: case.name)
@pytest.mark.parametrize("tuning", [Tuning(ctas=3), Tuning(pages=1, stages=3, ctas=3)], ids=["two pages", "one page"])
def test_b145_numbers_in_the_interpreter(case: PrefillCase, tuning: Tuning) -> None:
    """Chunks with and without prefix at unaligned rows, several tiles, fewer packed rows than a tile, stale NaN."""
    inputs = make_inputs(case, seed=0)
    options = {"tuning": tuning, "interpret": plgpu.InterpretGPUParams()}
    out = mosaic_gpu.run(*map(jnp.asarray, inputs), scale=case.scale, device=H200, **options)
    check(np.asarray(out), dense(*inputs, scale=case.scale))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 2, 128), (40, 40, 128), (9, 3, 64)])
def test_it_lowers_for_the_gpu(heads: int, kv_heads: int, head_dim: int) -> None:
    """Shapes, layouts and shared memory are checked by the lowering, which needs no GPU."""
    q = jax.ShapeDtypeStruct((2048, kv_heads, heads // kv_heads, head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, kv_heads, 64, head_dim), jnp.bfloat16)
    table, border = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=0.1, device=H200))
    text = call.trace(q, pool, pool, table, border, border, border).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_what_it_does_not_fit() -> None:
    fits = GqaPrefillShapes(2048, 8, 2, 16, 128, 64, 64, "bfloat16")
    assert mosaic_gpu.why_not(fits, H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(fits, Device("cpu")) or "")
    for field, value, reason in (
        ("dtype", "float32", "must be bfloat16"),
        ("page_tokens", 16, "must be 64"),
        ("head_dim", 256, "must be 64 or 128"),
    ):
        changed = GqaPrefillShapes(**{name: getattr(fits, name) for name in fits.__slots__} | {field: value})
        assert reason in (mosaic_gpu.why_not(changed, H200) or "")
