"""dense_gemm against numpy, and what its contract refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.dense_gemm import reference
from pallas_kernels.dense_gemm.cases import CASES, DenseCase, make_inputs
from pallas_kernels.dense_gemm.contract import dense_gemm
from pallas_kernels.device import Device

CPU = Device("cpu")
LENGTHS = jnp.arange(3, dtype=jnp.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_product(case: DenseCase) -> None:
    inputs = make_inputs(case, seed=0)
    made = jax.jit(functools.partial(dense_gemm, out_dtype=case.out_dtype, device=CPU))(*inputs, LENGTHS)
    assert made.dtype == (case.out_dtype or case.dtype)
    check(np.asarray(made), reference.dense(*inputs), dtype=case.dtype)


def test_arrays_that_do_not_belong_together() -> None:
    call = functools.partial(dense_gemm, device=CPU)
    x, w = jnp.ones((4, 32)), jnp.ones((16, 32))
    with pytest.raises(ValueError, match=r"w is \(16, 31\), must be \[N, 32\]"):
        call(x, w[:, 1:], LENGTHS)
    with pytest.raises(ValueError, match="x float32, w bfloat16 and the result float32 must have one dtype"):
        call(x, w.astype(jnp.bfloat16), LENGTHS)
    with pytest.raises(ValueError, match="the result bfloat16 must have one dtype"):
        call(x, w, LENGTHS, out_dtype=jnp.bfloat16)
