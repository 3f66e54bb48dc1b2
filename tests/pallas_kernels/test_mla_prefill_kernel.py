"""mla_prefill's Hopper kernels without a GPU: the work list, the numbers in the interpreter, and lowering for CUDA."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.mla_prefill import mosaic_gpu
from pallas_kernels.mla_prefill.cases import DEEPSEEK, GLM_FLASH, MIXED, PrefillCase, make_inputs
from pallas_kernels.mla_prefill.common import Tuning
from pallas_kernels.mla_prefill.contract import MlaPrefillShapes
from pallas_kernels.mla_prefill.reference import dense
from pallas_kernels.mla_prefill.tiles import head_rows, plan
from pallas_kernels.query_tiles import BASE, CHUNK

H200 = Device("gpu", "9.0")
LONG = ((3, 0, 129), (0, 700, 300), (0, 0, 0), (0, 0, 128), (5, 64, 64), (0, 91, 2), (0, 127, 369))
SHORT = ((2, 0, 17), (0, 0, 0), (0, 70, 33), (1, 63, 1))


def borders(chunks: tuple[tuple[int, int, int], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """start_R, tokens_R, position_R of chunks as the cases give them."""
    gaps, prefix, tokens = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    return (np.cumsum(gaps + tokens) - tokens).astype(np.int32), tokens, prefix


@pytest.mark.parametrize(("tokens", "chunks"), [(128, MIXED), (1000, LONG), (130, ((0, 5, 130),)), (128, ((9, 0, 0),))])
def test_the_plan(tokens: int, chunks: tuple[tuple[int, int, int], ...]) -> None:
    """Each chunk's context has scratch rows of its own, which its tiles know."""
    start, count, prefix = borders(chunks)
    sizes = {"tokens": tokens, "request_tokens": 1024, "heads": 12, "row_bytes": 512, "scratch_rows": 7 * 1024}
    tiles, where = plan(start, count, prefix, **sizes)
    where = type(where)(*map(np.asarray, where))
    rows, heads_of_pass, heads_of_section = where.sizes_3
    words = np.asarray(tiles.tile_W8)
    np.testing.assert_array_equal(words[:, BASE], where.base_R[words[:, CHUNK]])

    owners: dict[int, int] = {}
    for chunk, context in enumerate(np.where(count > 0, prefix + count, 0)):
        assert where.context_R[chunk] == context and where.base_R[chunk] % 128 == 0
        for block in range(where.base_R[chunk] // 128, -(-(where.base_R[chunk] + context) // 128)):
            assert block not in owners and where.chunk_Y[block] == chunk
            owners[block] = chunk
    assert sorted(owners) == list(range(rows // 128)) and rows <= head_rows(len(chunks), 1024)
    assert 12 % heads_of_pass == 0 and heads_of_pass % heads_of_section == 0
    assert heads_of_pass == 1 or heads_of_pass * rows <= sizes["scratch_rows"]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # stale latents are NaN, by intent
@pytest.mark.parametrize(
    ("model", "heads", "scratch_bytes"), [(DEEPSEEK, 2, 1 << 30), (DEEPSEEK, 2, 0), (GLM_FLASH, 1, 1 << 30)]
)
def test_b145_numbers_in_the_interpreter(model: dict[str, int], heads: int, scratch_bytes: int) -> None:
    """Chunks with and without prefix at unaligned rows, fewer packed rows than a tile, NaN in stale rows; in passes."""
    case = PrefillCase("mixed", 60, SHORT, heads, page_tokens=64, dtype="bfloat16", **model | {"rank": 128})
    inputs = make_inputs(case, seed=0)
    tuning = replace(Tuning.of(case.nope_dim + case.value_dim), ctas=3)
    options = {"scale": case.scale, "device": H200, "tuning": tuning, "scratch_bytes": scratch_bytes}
    if not scratch_bytes:  # the table is of a size that one head's rows fill the scratch: 2 passes
        inputs = inputs._replace(table_RM=inputs.table_RM[:, :2])
    out = mosaic_gpu.run(*map(jnp.asarray, inputs), **options, interpret=plgpu.InterpretGPUParams())
    check(np.asarray(out), dense(*inputs, scale=case.scale))


@pytest.mark.parametrize(("heads", "nope_dim", "value_dim"), [(16, 128, 128), (128, 128, 128), (20, 192, 256)])
def test_it_lowers_for_the_gpu(heads: int, nope_dim: int, value_dim: int) -> None:
    """Shapes, layouts and shared memory are checked by the lowering, which needs no GPU."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    ups = (array(heads, nope_dim, 512), array(heads, value_dim, 512))
    table, border = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=0.1, device=H200))
    arguments = (array(2048, heads, nope_dim + 64), array(32, 64, 576), *ups, table, border, border, border)
    text = call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 2


def test_what_it_does_not_fit() -> None:
    fits = MlaPrefillShapes(2048, 16, 16, 128, 64, 128, 512, 64, 2560, "bfloat16")
    assert mosaic_gpu.why_not(fits, H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(fits, Device("cpu")) or "")
    for field, value, reason in (
        ("dtype", "float32", "must be bfloat16"),
        ("page_tokens", 16, "must be 64"),
        ("rope_dim", 32, "must be 64"),
        ("nope_dim", 64, "must be 128, 128 or 192, 256"),
        ("rank", 256, "must be 512"),
        ("max_pages", 16000, "must be at most 4096"),
    ):
        assert reason in (mosaic_gpu.why_not(replace(fits, **{field: value}), H200) or "")
