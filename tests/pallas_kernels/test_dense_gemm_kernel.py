"""dense_gemm's Hopper kernel without a GPU: numbers in the interpreter, lowering for CUDA, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.dense_gemm import mosaic_gpu, reference
from pallas_kernels.dense_gemm.cases import CASES, DenseCase, block, make_inputs, one
from pallas_kernels.dense_gemm.contract import SYNC_WORDS, DenseGemmShapes, Stage, X
from pallas_kernels.dense_gemm.kernel import Tuning, meetings, sync_words
from pallas_kernels.device import Device

H200 = Device("gpu", "9.0")
BLOCK = next(case for case in CASES if case.name == "block")
SMALL = {"slots": 4, "token_slots": 2}


@pytest.mark.parametrize(
    ("case", "tuning"),
    [
        (one("", 8, 256, 256), Tuning(ctas=3, **SMALL)),
        (one("one token, tiles over several CTAs", 1, 128, 640), Tuning(ctas=7, **SMALL)),
        (one("more CTAs than units", 3, 128, 128), Tuning(ctas=5, **SMALL)),
        (one("half a tile", 9, 448, 192, bias=True, residual=X), Tuning(ctas=5, blocks=2, **SMALL)),
        (one("gate and up", 16, 192, 320, gated=True), Tuning(ctas=4, **SMALL)),
        (one("exact", 3, 192, 128, exact=True), Tuning(ctas=2, **SMALL)),
        (BLOCK, Tuning(ctas=3, **SMALL)),
    ],
    ids=lambda value: value.name if isinstance(value, DenseCase) else "",
)
def test_in_the_interpreter(case: DenseCase, tuning: Tuning) -> None:
    """The last result is full of NaN before, so that a column that is not written is seen. Inline PTX, which signals
    between CTAs, is left out: there they run one after the other, and several stages one launch each."""
    arrays = make_inputs(case, seed=0)
    dtype = jnp.float32 if case.stages[-1].exact else jnp.bfloat16
    poison = jnp.full((case.tokens, case.sizes[-1][0]), jnp.nan, dtype)
    made = mosaic_gpu.run(
        case.stages,
        {name: jnp.asarray(array) for name, array in arrays.items()},
        device=H200,
        tuning=tuning,
        out_TN=poison,
        interpret=plgpu.InterpretGPUParams(inline_mgpu="ignore"),
    )
    for number, (got, expected) in enumerate(zip(made, reference.dense_chain(case.stages, arrays), strict=True)):
        check(np.asarray(got), expected, label=f"stage {number}")


@pytest.mark.parametrize(
    "case",
    [
        one("", 1, 13824, 5120),
        one("", 16, 3648, 2048, bias=True, residual=X),
        one("", 64, 13696, 4096, gated=True),
        one("", 128, 5120, 13824),
        one("", 64, 151552, 4096, exact=True),
        DenseCase("", 16, *block(2048, 2048, 11264, 128, 3648)),
        DenseCase("", 128, *block(2048, 2048, 11264, 128, 3648)),
    ],
    ids=lambda case: f"{case.tokens} {case.sizes}",
)
def test_it_lowers_for_the_gpu(case: DenseCase) -> None:
    """Shapes, layouts and shared memory of the chosen tuning are checked by the lowering, which needs no GPU."""
    small = DenseCase("", case.tokens, case.stages, tuple((128, 64) for _ in case.sizes))
    shapes = {"x": (case.tokens, case.width)}
    for name, array in make_inputs(small, seed=0).items():
        number = int(name[-1]) if name != "x" else 0
        N, K = case.sizes[number]
        full = {"w": (array.shape[0], N, K), "r": (case.tokens, N), "x": (case.tokens, K)}
        shapes[name] = full.get(name[0], (N,))
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}

    def call(arrays: dict[str, jax.Array], ahead: jax.Array) -> list[jax.Array]:
        return mosaic_gpu.run(case.stages, arrays, ahead=(ahead,), device=H200)

    ahead = jax.ShapeDtypeStruct((1, 2048, 2048), jnp.bfloat16)
    text = jax.jit(call).trace(arrays, ahead).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def shapes(**change: object) -> DenseGemmShapes:
    fields = {"tokens": 16, "stages": (Stage(),), "inner": (2048,), "columns": (3648,), "dtype": "bfloat16"}
    return DenseGemmShapes(**fields | change)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"tokens": 129}, "there are 129 tokens, must be 1 to 128"),
        ({"tokens": 0}, "there are 0 tokens"),
        ({"inner": (96,)}, "stage 0 sums over 96, must be a multiple of 64"),
        ({"columns": (64,)}, "stage 0 has 64 columns, must be a multiple of 64 and 128 at least"),
        ({"columns": (160,)}, "stage 0 has 160 columns"),
        ({"stages": (Stage(),) * 16, "inner": (64,) * 16, "columns": (128,) * 16}, "16 stages in a row, too many"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(shapes(**change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(shapes(), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(shapes(), Device("cpu")) or "")
    assert sync_words(15, Tuning()) <= SYNC_WORDS < sync_words(16, Tuning())


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("stages", [(Stage(),), (Stage(residual=X, exact=True),), (Stage(gated=True),), BLOCK.stages])
def test_slots_fill_shared_memory_and_cannot_block(tokens: int, stages: tuple[Stage, ...]) -> None:
    """A step holds its slots until the next one runs, so two steps of the widest stage must fit."""
    tuning = mosaic_gpu.tuning_for(tokens, stages)
    blocks = max(tuning.blocks, *(1 + stage.gated for stage in stages))
    assert tuning.slots >= 2 * blocks and tuning.token_slots >= 2


def test_ctas_meet_only_where_a_stage_needs_the_others() -> None:
    """The router and the gate and up projections both read the first stage's result: one meeting serves both."""
    assert meetings(BLOCK.stages) == [False, True, False, True, True]
    assert meetings((Stage(), Stage())) == [False, False]
    # The residual of the last stage is older than the last meeting.
    assert meetings((Stage(), Stage(source=0), Stage(residual=0))) == [False, True, False]
