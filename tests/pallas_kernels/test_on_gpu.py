"""The native kernels on the GPU they are for, each case five times: wrong is wrong, and so is a moving error."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels.bench import OPS, part
from pallas_kernels.compare import difference
from pallas_kernels.device import device_of


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_numbers_and_races(op: str) -> None:
    device, check = device_of(jax.devices()[0]), part(op, "check")
    for label, run in check.checks(device):
        (first, expected), *others = [run() for _ in range(5)]
        found = difference(first, expected)
        assert check.passes(found), f"{label}: {found}"
        assert all(np.array_equal(first, other) for other, _ in others), f"{label} moves between runs"
