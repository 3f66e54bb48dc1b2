"""dense_gemm against numpy: single products with their epilogues, several in a row, and what it refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check, difference
from pallas_kernels.dense_gemm import reference, xla
from pallas_kernels.dense_gemm.cases import CASES, DenseCase, make_inputs
from pallas_kernels.dense_gemm.contract import Stage, X, dense_chain, dense_gemm
from pallas_kernels.device import Device

CPU = Device("cpu")
BLOCK = next(case for case in CASES if case.name == "block fp32")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_stage(case: DenseCase) -> None:
    """Under jit, as the models call it. What a row of products rounds between them adds to the error."""
    arrays = make_inputs(case, seed=0)
    made = jax.jit(functools.partial(xla.run, case.stages, device=CPU))(arrays)
    assert len(made) == len(case.stages)
    for number, (one, expected) in enumerate(zip(made, reference.dense_chain(case.stages, arrays), strict=True)):
        assert one.shape == (case.tokens, case.sizes[number][0])
        assert one.dtype == (np.float32 if case.stages[number].exact else arrays["x"].dtype)
        check(np.asarray(one), expected, label=f"stage {number}")


def test_the_reference_itself() -> None:
    """One column by hand: silu(1 * 2) * (1 * 3), and a norm of (3, 4) whose mean square is 12.5."""
    arrays = {"x": np.ones((1, 1)), "w0": np.array([[[2.0]], [[3.0]]])}
    [gated] = reference.dense_chain((Stage(gated=True),), arrays)
    assert gated.item() == pytest.approx(2 / (1 + np.exp(-2)) * 3)
    stages = (Stage(normed=True), Stage(source=0, norm_eps=0.0, residual=X, bias=True))
    arrays = {"x": np.ones((1, 1)), "w0": np.array([[[3.0], [4.0]]]), "norm0": np.array([1.0, 2.0])}
    arrays |= {"w1": np.array([[[1.0, 1.0]]]), "residual1": np.array([[10.0]]), "bias1": np.array([100.0])}
    assert reference.dense_chain(stages, arrays)[1].item() == pytest.approx(110 + (3 + 8) / 12.5**0.5)


def test_one_product_through_the_contract() -> None:
    """Without an axis for the number of products, with bias and residual, and with two weights."""
    rng = np.random.default_rng(0)
    x, w, both = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 64), (128, 64), (2, 128, 64)))
    bias, residual = rng.standard_normal(128).astype(np.float32), rng.standard_normal((3, 128)).astype(np.float32)
    call = functools.partial(dense_gemm, device=CPU, implementation="xla")
    assert call(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), exact=True).dtype == np.float32
    check(np.asarray(call(x, w)), x @ w.T)
    check(np.asarray(call(x, w, bias_N=bias, residual_TN=residual)), x @ w.T + bias + residual)
    gate = x @ both[0].T
    check(np.asarray(call(x, both)), gate / (1 + np.exp(-gate)) * (x @ both[1].T))


def test_a_wider_source_counts_with_its_first_columns() -> None:
    arrays = make_inputs(BLOCK, seed=1)
    wide = arrays | {"x": np.concatenate((arrays["x"], np.full_like(arrays["x"], np.nan)), axis=1)}
    call = functools.partial(dense_chain, BLOCK.stages, device=CPU, implementation="xla")
    for one, other in zip(call(arrays), call(wide), strict=True):
        assert difference(np.asarray(other), np.asarray(one)).norm == 0


def test_residuals_are_added_before_rounding() -> None:
    """256 + 1 rounds to 256 in bf16; with -256 added first it is 1."""
    x, w = jnp.array([[256.0, 1.0]], jnp.bfloat16), jnp.ones((1, 2), jnp.bfloat16)
    made = dense_gemm(x, w, residual_TN=jnp.array([[-256.0]], jnp.bfloat16), device=CPU, implementation="xla")
    assert made.item() == 1


def without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in make_inputs(BLOCK, seed=0).items() if key != name}


@pytest.mark.parametrize(
    ("stages", "arrays", "reason"),
    [
        (BLOCK.stages, without("norm0"), "arrays are"),
        (
            BLOCK.stages,
            without("residual0") | {"residual0": np.zeros((2, 8), np.float32)},
            r"residual0 is float32 \(2, 8\)",
        ),
        (BLOCK.stages, without("norm0") | {"norm0": np.zeros(256, np.float16)}, "norm0 is float16"),
        (
            (Stage(source=0),),
            {"x": np.zeros((1, 2)), "w0": np.zeros((2, 2))},
            "source of stage 0 is 0, must be -1 to -1",
        ),
        ((Stage(),), {"x": np.zeros((1, 2)), "w0": np.zeros((2, 4))}, "w0 sums over 4, its tokens have 2 columns"),
        ((Stage(),), {"x": np.zeros((1, 4)), "w0": np.zeros((2, 2))}, "w0 sums over 2, its tokens have 4 columns"),
        ((Stage(),), {"x": np.zeros((1, 2)), "w0": np.zeros((2, 4, 2))}, "w0 holds 2 weights, must be 1"),
        (
            (Stage(gated=True, bias=True),),
            {"x": np.zeros((1, 2)), "w0": np.zeros((2, 4, 2))},
            "neither bias nor residual",
        ),
        ((Stage(exact=True, normed=True),), {"x": np.zeros((1, 2)), "w0": np.zeros((4, 2))}, "so no norm follows it"),
        ((Stage(exact=True), Stage(source=0)), without(""), "which is exact and nobody's source"),
        ((Stage(norm_eps=1e-6),), {"x": np.zeros((1, 2)), "w0": np.zeros((4, 2))}, "its source must be a stage"),
        ((Stage(),), {"x": np.zeros((1, 2), np.int8), "w0": np.zeros((2, 2), np.int8)}, "dtype is int8"),
    ],
)
def test_arrays_that_do_not_belong_together(stages: tuple, arrays: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dense_chain(stages, {name: jnp.asarray(array) for name, array in arrays.items()}, device=CPU)
