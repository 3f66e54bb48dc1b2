"""sampling's Hopper kernels without a GPU: the numbers in the interpreter, lowering for CUDA, and what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device
from pallas_kernels.sampling import mosaic_gpu
from pallas_kernels.sampling.cases import ALL, SamplingCase, make_inputs
from pallas_kernels.sampling.common import LARGEST_VOCAB, Tuning
from pallas_kernels.sampling.contract import SamplingShapes
from pallas_kernels.sampling.reference import sort_based

H200 = Device("gpu", "9.0")
# Short lists, so that small rows take every path: few on the list, many on it, and too many for it.
SMALL = Tuning(list_rows=8, few_rows=1, guess=32, stages=2)
# On a short list, a long one, past it; nothing filtered; each filter alone and all of them.
LISTED = ((1, 1.0, 0.0), (ALL, 1.0, 0.0), (50, 0.9, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.1), (40, 0.8, 0.02))
WHOLE = ((0, 0.9, 0.0), (3000, 0.6, 0.0), (500, 1.0, 1e-3))
CASES = (
    SamplingCase("probabilities, no multiple of a tile", 9088, (*LISTED, *WHOLE)),
    SamplingCase("logits, no multiple of a chunk", 8200, (*LISTED, *WHOLE), logits=True),
    SamplingCase("ties", 8960, (*LISTED, *WHOLE), data="integers"),
    SamplingCase("sorted", 8192, (LISTED[2], *WHOLE), data="sorted"),
    SamplingCase("flat logits", 8320, WHOLE, width=1.0, logits=True),
    SamplingCase("small", 100, (LISTED[2], WHOLE[0])),
)


def interpreted(inputs: tuple[np.ndarray | None, ...]) -> np.ndarray:
    """Tokens and numbers kept, [2, B]."""
    return np.stack(mosaic_gpu.run(*inputs, device=H200, tuning=SMALL, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b145_numbers_in_the_interpreter(case: SamplingCase) -> None:
    """Every filter and path, with ties, and likely elements that all lie together."""
    inputs = make_inputs(case, seed=0)
    np.testing.assert_array_equal(interpreted(inputs), np.stack(sort_based(*inputs)))


def test_rows_with_nothing_or_one_thing_to_draw() -> None:
    """Masked logits, all equal ones, and a row that is masked whole; probabilities that are all equal."""
    x_BV = np.full((4, 8192), -np.inf, np.float32)
    x_BV[0, 8191], x_BV[1, [3, 5000]], x_BV[2] = 5.0, -2.0, 1.0
    uniform_B, whole = np.full(4, 1 - 2**-24, np.float32), np.ones(4, np.float32)
    top_k_B, top_p_B = np.array([50, 0, 3, 3], np.int32), np.array([0.9, 0.9, 0.5, 0.5], np.float32)
    out = interpreted((x_BV, uniform_B, top_k_B, top_p_B, 0 * whole, whole))
    assert out.tolist() == [[8191, 5000, 8191, 0], [1, 2, 8192, 0]]
    out = interpreted((0 * x_BV[2:3] + 1, uniform_B[:1], 0 * top_k_B[:1], top_p_B[:1], 0 * whole[:1], None))
    assert out.tolist() == [[8191], [8192]]


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    inputs = make_inputs(SamplingCase("neighbours", 8320, (LISTED[2], WHOLE[0])), seed=3)
    together = interpreted(inputs)
    alone = [interpreted(tuple(a if a is None else a[i : i + 1] for a in inputs)) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(alone, axis=1), together)


@pytest.mark.parametrize(("vocab", "logits"), [(151552, False), (154880, True), (129280, True), (49152, False)])
def test_it_lowers_for_the_gpu(vocab: int, logits: bool) -> None:
    """Shapes, layouts and shared memory are checked by the lowering, which needs no GPU."""
    x, real = jax.ShapeDtypeStruct((3, vocab), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
    arrays = (x, real, jax.ShapeDtypeStruct((3,), jnp.int32), real, real, real if logits else None)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, device=H200))
    text = call.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


def test_where_it_fits() -> None:
    shapes = SamplingShapes(rows=3, vocab=151552, logits=True)
    assert mosaic_gpu.why_not(shapes, H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(shapes, Device("cpu")) or "")
    wide = SamplingShapes(rows=3, vocab=LARGEST_VOCAB + 1, logits=True)
    assert f"has {LARGEST_VOCAB + 1} tokens, must be {LARGEST_VOCAB} at most" in (mosaic_gpu.why_not(wide, H200) or "")
