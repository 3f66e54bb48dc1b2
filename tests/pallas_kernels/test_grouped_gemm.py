"""grouped_gemm against numpy: experts without rows, rows without experts, and neighbours that must not matter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm import reference
from pallas_kernels.grouped_gemm.cases import CASES, GemmCase, make_inputs
from pallas_kernels.grouped_gemm.contract import down, gate_up
from pallas_kernels.grouped_gemm.xla import run, tile_rows

CPU = Device("cpu")
RAGGED = next(case for case in CASES if case.name == "ragged")


def both(case: GemmCase, device: Device, seed: int = 0) -> None:
    """gate_up and down of a case, under jit as the models call them, against the reference."""
    x_TD, row_A, w_X2FD, size_X, h_AF, w_XDF, weight_A = make_inputs(case, seed)
    live = size_X.sum()
    made = jax.jit(functools.partial(gate_up, device=device))(x_TD, row_A, w_X2FD, size_X)
    assert made.shape == h_AF.shape and made.dtype == x_TD.dtype
    check(np.asarray(made)[:live], reference.gate_up(x_TD, row_A[:live], w_X2FD, size_X), label="gate_up")
    made = jax.jit(functools.partial(down, device=device))(h_AF, w_XDF, size_X, weight_A)
    assert made.dtype == h_AF.dtype
    check(np.asarray(made)[:live], reference.down(h_AF, w_XDF, size_X, weight_A), label="down")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_of_every_expert(case: GemmCase) -> None:
    both(case, CPU)


@pytest.mark.parametrize("columns", [128, 160, 192, 256, 1408, 2048])
def test_b147_any_width_and_any_sizes(columns: int) -> None:
    """B147: 512 rows over 2, 8 and 256 experts, some or all without rows; a width is gate_up's N and down's K."""
    for name, sizes, unused in (
        ("even", (256, 256), 0),
        ("uneven", (257, 255), 0),
        ("all to one", (512, 0), 0),
        ("8 experts", (0, 1, 63, 64, 65, 0, 191, 128), 0),
        ("256 experts", (3, 1, 0, 4) * 64, 0),
        ("nobody", (0,) * 256, 512),
    ):
        if columns <= 256 or len(sizes) <= 8:  # the rest is half a gigabyte of random numbers
            both(GemmCase(f"{name} n{columns}", sizes, unused, 64, columns, "bfloat16"), CPU)


def test_a_fixed_number_of_tiles_as_on_a_gpu() -> None:
    """There the loop runs over all tiles that any sizes can need; the surplus ones write past the rows."""
    both(RAGGED, Device("gpu", "8.0"), seed=1)


def test_a_row_does_not_see_its_neighbours() -> None:
    """The same row among others, at another place of another tile, is the same to rounding."""
    x_TD, row_A, w_X2FD, size_X, *_ = make_inputs(RAGGED, seed=2)
    call = jax.jit(functools.partial(gate_up, device=CPU))
    whole = np.asarray(call(x_TD, row_A, w_X2FD, size_X))
    first = size_X[:6].sum()  # expert 6's first row
    alone = np.asarray(call(x_TD, row_A[first : first + 1], w_X2FD, np.eye(1, len(size_X), 6, dtype=np.int32)[0]))
    np.testing.assert_allclose(alone[0], whole[first], rtol=1e-6, atol=1e-6)


def test_the_combine_weight_multiplies_before_rounding() -> None:
    """257 x (256 / 257) is 256 in fp32; 257 rounded to bf16 first is 256, and the result 255."""
    h_AF, w_XDF = jnp.array([[1.0, 1.0]], jnp.bfloat16), jnp.array([[[256.0, 1.0]]], jnp.bfloat16)
    weight_A = jnp.array([256 / 257], jnp.float32)
    assert down(h_AF, w_XDF, jnp.array([1]), weight_A, device=CPU).item() == 256


def test_one_plain_product() -> None:
    """Neither tokens to gather nor weights: the form that is timed against the rivals."""
    *_, size_X, h_AF, w_XDF, _ = make_inputs(RAGGED, seed=3)
    arrays = map(jnp.asarray, (h_AF, w_XDF[:, None], size_X))
    made = run(*arrays, row_A=None, weight_A=None, device=CPU)
    check(np.asarray(made)[: size_X.sum()], reference.products(h_AF, w_XDF, size_X))


@pytest.mark.parametrize(("rows", "experts", "expected"), [(1, 64, 8), (384, 64, 8), (3072, 64, 64), (24576, 64, 128)])
def test_tiles_hold_about_an_experts_share(rows: int, experts: int, expected: int) -> None:
    assert tile_rows(rows, experts) == expected


@pytest.mark.parametrize("device", [CPU, Device("gpu", "8.0")], ids=str)
def test_sizes_may_go_on_with_zeros(device: Device) -> None:
    x_TD, row_A, w_X2FD, size_X, *_ = make_inputs(RAGGED, seed=0)
    call = jax.jit(functools.partial(gate_up, device=device))
    made, longer = (np.asarray(call(x_TD, row_A, w_X2FD, np.pad(size_X, (0, more)))) for more in (0, 6))
    np.testing.assert_array_equal(made[: size_X.sum()], longer[: size_X.sum()])


def test_arrays_that_do_not_belong_together() -> None:
    x_TD, row_A, w_X2FD, size_X, h_AF, w_XDF, weight_A = map(jnp.asarray, make_inputs(RAGGED, seed=0))
    with pytest.raises(ValueError, match=r"must be \[X, 2, F, 48\]"):
        gate_up(x_TD, row_A, w_X2FD[:, :1], size_X, device=CPU)
    with pytest.raises(ValueError, match=r"must be \[X, D, 40\]"):
        down(h_AF, w_X2FD[:, 0], size_X, weight_A, device=CPU)
    with pytest.raises(ValueError, match=r"size is \(3,\), must be \(10,\)"):
        gate_up(x_TD, row_A, w_X2FD, size_X[:3], device=CPU)
    with pytest.raises(ValueError, match="dtypes bfloat16 and float32"):
        gate_up(x_TD.astype(jnp.bfloat16), row_A, w_X2FD, size_X, device=CPU)
    with pytest.raises(ValueError, match="weight_A is float16"):
        down(h_AF, w_XDF, size_X, weight_A.astype(jnp.float16), device=CPU)
