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
from pallas_kernels.gqa_prefill.cases import MIXED, PrefillCase, make_inputs
from pallas_kernels.gqa_prefill.contract import GqaPrefillShapes
from pallas_kernels.gqa_prefill.kernel import Tuning
from pallas_kernels.gqa_prefill.reference import dense
from pallas_kernels.gqa_prefill.tiles import cut_tiles, find_gaps, tile_slots

H200 = Device("gpu", "9.0")
LONG = ((3, 0, 129), (0, 700, 300), (0, 0, 0), (0, 0, 128), (5, 64, 64), (0, 91, 2), (0, 127, 369))


@pytest.mark.parametrize(("tokens", "chunks"), [(128, MIXED), (1000, LONG), (130, ((0, 5, 130),)), (128, ((9, 0, 0),))])
def test_tiles_hold_every_row_once(tokens: int, chunks: tuple[tuple[int, int, int], ...]) -> None:
    """Each row of a chunk is live in one tile, at its position; tiles stay inside the packed rows; longest first."""
    start, row = [], 0
    for gap, _, count in chunks:
        start.append(row + gap)
        row += gap + count
    prefix, count = (np.array([chunk[i] for chunk in chunks], np.int32) for i in (1, 2))
    made = cut_tiles(np.array(start, np.int32), count, prefix, tokens=tokens, tile_tokens=128)
    tiles = type(made)(*map(np.asarray, made))
    assert len(tiles.row_W) == tile_slots(tokens, len(chunks), 128)
    seen: dict[int, tuple[int, int]] = {}
    for slot in range(len(tiles.row_W)):
        assert 0 <= tiles.row_W[slot] <= tokens - 128
        for i in range(tiles.first_live_W[slot], tiles.end_live_W[slot]):
            assert 0 <= i < 128 and tiles.row_W[slot] + i not in seen
            seen[int(tiles.row_W[slot] + i)] = (int(tiles.chunk_W[slot]), int(tiles.position_W[slot] + i))
            assert tiles.position_W[slot] + i < tiles.keys_W[slot]
    owned = {start[r] + i: (r, int(prefix[r]) + i) for r in range(len(chunks)) for i in range(count[r])}
    assert seen == owned
    assert (np.diff(tiles.keys_W) <= 0).all()
    gaps = find_gaps(np.array(start, np.int32), count, tokens=tokens, block_rows=128)
    free = np.array([row not in owned for row in range(tokens)])
    np.testing.assert_array_equal(np.asarray(gaps.owned_T) == 0, free)
    assert np.asarray(gaps.rows_Z).tolist() == [free[row : row + 128].sum() for row in range(0, tokens, 128)]


SHORT = PrefillCase("short", 60, ((2, 0, 17), (0, 70, 33), (1, 63, 1)), 1, 2, 64, 64, "bfloat16")
LONGER = PrefillCase("longer", 200, ((2, 0, 140), (0, 300, 33), (1, 63, 1)), 1, 1, 128, 64, "bfloat16")


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # stale keys are NaN, by intent
@pytest.mark.parametrize("case", [SHORT, LONGER], ids=lambda case: case.name)
@pytest.mark.parametrize("tuning", [Tuning(), Tuning(pages=1, stages=3)], ids=["two pages", "one page"])
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
