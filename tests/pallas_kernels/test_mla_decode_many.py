"""mla_decode's Hopper kernel for more than 32 queries a row, without a GPU: numbers, turns of rows, lowering."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.cases import DecodeCase, DecodeInputs, make_inputs
from pallas_kernels.mla_decode.reference import dense

H200 = Device("gpu", "9.0")


def interpreted(case: DecodeCase, inputs: DecodeInputs, parts: int, *, races: bool = False) -> np.ndarray:
    """The kernel in the interpreter, its pages cut into `parts`; races: looks for them, and prints what it finds."""
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    tuning = replace(mosaic_gpu.tuning_for(case.heads * (case.tokens or 1)), parts=parts, min_pages=1)
    options = {"rank": case.rank, "scale": case.scale, "device": H200, "tuning": tuning}
    return np.asarray(mosaic_gpu.run(*map(jnp.asarray, inputs), **options, interpret=interpret))


@pytest.mark.parametrize(
    ("heads", "tokens", "parts", "lengths"),
    [
        (33, None, 1, (1, 63, 0, 64, 65)),  # rows of one page follow each other in a part
        (64, None, 3, (449,)),  # one row over several parts: the ring goes round
        (20, 3, 2, (2, 0, 66, 130)),  # 60 rows of one block, of three tokens, some before the row's first
        (40, 2, 1, (1, 65)),  # tokens that share a block, and one with a block of its own
    ],
)
def test_b145_numbers(heads: int, tokens: int | None, parts: int, lengths: tuple[int, ...]) -> None:
    """NaN in stale rows, hostile tables, rows of length 0, query tokens before the first one."""
    case = DecodeCase("many", lengths, heads, page_tokens=64, dtype="bfloat16", tokens=tokens)
    inputs = make_inputs(case, seed=0)
    out = interpreted(case, inputs, parts)
    check(out, dense(*inputs, rank=case.rank, scale=case.scale), label=case.name)
    for row, length in enumerate(lengths):
        unseen = 1 if tokens is None else tokens
        assert not out[row].reshape(unseen, heads, -1)[: max(0, unseen - length)].any()


def test_warpgroups_do_not_race(capfd: pytest.CaptureFixture[str]) -> None:
    """Boxes are refilled, and weights, factors and sums replaced, after their readers: the ring goes round."""
    case = DecodeCase("races", (1, 64, 200), heads=64, page_tokens=64, dtype="bfloat16")
    interpreted(case, make_inputs(case, seed=0), 1, races=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("queries", [(33,), (5, 8), (2, 64), (2, 128), (8, 128), (7, 20)])
def test_it_lowers_for_the_gpu_as_one_kernel(queries: tuple[int, ...]) -> None:
    """Shapes, layouts and shared memory are checked by the lowering; what is cut is merged in the same kernel."""
    q = jax.ShapeDtypeStruct((16, *queries, 576), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, 64, 576), jnp.bfloat16)
    table, length = jax.ShapeDtypeStruct((16, 64), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    tuning = mosaic_gpu.tuning_for(math.prod(queries))
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, rank=512, scale=0.1, device=H200, tuning=tuning))
    text = call.trace(q, pool, table, length).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_all_ctas_are_resident_at_once(tokens: int) -> None:
    """Parts of a row wait for each other, so no CTA may have to wait for another to end: one fits on an SM."""
    blocks = 128 * tokens // 64
    assert mosaic_gpu.tuning_for(128 * tokens).parts * blocks <= 132
