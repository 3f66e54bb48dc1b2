"""sampling in plain XLA against a sort in numpy: what is kept, ties, edges, and independence of neighbours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import Device
from pallas_kernels.sampling import xla
from pallas_kernels.sampling.cases import ALL, CASES, SamplingCase, make_inputs
from pallas_kernels.sampling.contract import sample
from pallas_kernels.sampling.reference import sort_based

CPU = Device("cpu")
RUN = jax.jit(functools.partial(xla.run, device=CPU))


def drawn(
    weights: list[float], uniform: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[int, int]:
    """Token and number kept of one row."""
    numbers = [np.array([number], np.float32) for number in (uniform, top_p, min_p)]
    x_BV = np.array([weights], np.float32)
    token_B, kept_B = RUN(x_BV, numbers[0], np.array([top_k], np.int32), *numbers[1:])
    assert [token_B.item(), kept_B.item()] == [
        out.item() for out in sort_based(x_BV, numbers[0], np.array([top_k], np.int32), *numbers[1:])
    ]
    return token_B.item(), kept_B.item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_and_numbers_kept(case: SamplingCase) -> None:
    inputs = make_inputs(case, seed=0)
    token_B, kept_B = RUN(*inputs)
    assert token_B.dtype == kept_B.dtype == jnp.int32
    expected_token_B, expected_kept_B = sort_based(*inputs)
    np.testing.assert_array_equal(kept_B, expected_kept_B)
    np.testing.assert_array_equal(token_B, expected_token_B)


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    inputs = make_inputs(CASES[0], seed=3)
    together = np.stack(RUN(*inputs))
    turned = np.stack(RUN(*(None if array is None else array[::-1] for array in inputs)))
    np.testing.assert_array_equal(turned[:, ::-1], together)
    for row in range(len(together[0])):
        alone = RUN(*(None if array is None else array[row : row + 1] for array in inputs))
        np.testing.assert_array_equal(np.stack(alone)[:, 0], together[:, row])


def test_ties_with_the_kth_stay_in() -> None:
    assert drawn([4, 2, 2, 2, 1], 0.0, top_k=2) == (0, 4)
    assert drawn([4, 2, 2, 2, 1], 0.99, top_k=4) == (3, 4)
    assert drawn([1] * 300, 0.999, top_k=1) == (299, 300)


def test_top_p_is_reached_exactly_and_ties_stay_together() -> None:
    assert drawn([4, 2, 1, 1], 0.9, top_p=0.5)[1] == 1
    assert drawn([4, 2, 1, 1], 0.9, top_p=0.75)[1] == 2
    assert drawn([4, 2, 1, 1], 0.99, top_p=0.76) == (3, 4)
    assert drawn([4, 2, 1, 1], 0.0, top_p=0.0) == (0, 1)


def test_top_p_is_of_what_top_k_left() -> None:
    """Of 4 + 2 + 2, three quarters are all that are left; of all 16 they would be four elements more."""
    assert drawn([4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1], 0.99, top_k=3, top_p=0.75) == (2, 3)
    assert drawn([8, 4, 2, 1, 1], 0.99, top_k=2, top_p=0.6) == (0, 1)


def test_min_p_is_of_the_largest_weight() -> None:
    assert drawn([8, 4, 2, 1], 0.99, min_p=0.25) == (2, 3)
    assert drawn([8, 4, 2, 8], 0.0, min_p=1.0) == (0, 2)


def test_the_draw_goes_through_the_ids_in_order() -> None:
    ids = [drawn([1, 0, 2, 1], uniform)[0] for uniform in (0.0, 0.24, 0.25, 0.74, 0.75, 1 - 2**-24)]
    assert ids == [0, 0, 2, 2, 3, 3]


def test_what_is_impossible_is_never_drawn() -> None:
    """Masked logits; a row with one token left; a row with none gives 0."""
    x_BV = np.full((3, 200), -np.inf, np.float32)
    x_BV[0, 7], x_BV[1, [3, 150]] = 5.0, -2.0
    almost_one = np.full(3, 1 - 2**-24, np.float32)
    some, off, whole = np.zeros(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.float32)
    token_B, kept_B = RUN(x_BV, almost_one, off, 0.9 * whole, some, whole)
    assert token_B.tolist() == [7, 150, 0] and kept_B.tolist() == [1, 2, 0]
    token_B, kept_B = RUN(np.zeros((1, 200), np.float32), almost_one[:1], off[:1], whole[:1], some[:1])
    assert (token_B.item(), kept_B.item()) == (0, 0)


@pytest.mark.parametrize("data", [np.nan, np.inf])
@pytest.mark.parametrize("logits", [False, True], ids=["probabilities", "logits"])
@pytest.mark.parametrize("filters", [{}, {"top_k_B": 3}, {"top_p_B": 0.5}, {"min_p_B": 0.1}], ids=str)
def test_a_row_without_a_finite_sum_gives_nothing(data: float, logits: bool, filters: dict[str, float]) -> None:
    """Also where the filters would leave the NaN out; its neighbour is drawn as ever."""
    x_BV = np.tile(np.linspace(1, 2, 300, dtype=np.float32), (2, 1))
    x_BV[0, 7] = data
    whole = np.ones(2, np.float32)
    named = {name: np.full(2, number, "int32" if name == "top_k_B" else "float32") for name, number in filters.items()}
    token_B, kept_B = RUN(x_BV, 0.5 * whole, **named, temperature_B=whole if logits else None)
    assert (token_B[0], kept_B[0]) == (0, 0) and token_B[1] > 100 and kept_B[1] > 2


def test_frequencies_follow_the_weights() -> None:
    rows = 4096
    weight_V = np.array([5, 1, 0, 3, 1], np.float32)
    uniform_B = np.random.default_rng(0).random(rows, dtype=np.float32)
    off = np.zeros(rows, np.float32)
    token_B, _ = RUN(np.tile(weight_V, (rows, 1)), uniform_B, off.astype(np.int32), off + 1, off)
    assert np.abs(np.bincount(token_B, minlength=5) / rows - weight_V / 10).max() < 0.03


@pytest.mark.parametrize(
    ("place", "array", "reason"),
    [
        (0, np.zeros((2, 8), np.float16), r"x is float16 \(2, 8\), must be float32"),
        (1, np.zeros(3, np.float32), r"uniform is float32 \(3,\), must be float32 \(2,\)"),
        (2, np.zeros(2, np.float32), r"top_k is float32 \(2,\), must be int32"),
        (5, np.zeros((2, 1), np.float32), r"temperature is float32 \(2, 1\)"),
    ],
)
def test_arrays_that_do_not_belong_together(place: int, array: np.ndarray, reason: str) -> None:
    numbers = np.ones(2, np.float32)
    arrays = [np.ones((2, 8), np.float32), numbers, np.full(2, ALL, np.int32), numbers, numbers, numbers]
    arrays[place] = array
    with pytest.raises(ValueError, match=reason):
        sample(*map(jnp.asarray, arrays), device=CPU)
