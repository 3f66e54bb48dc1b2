"""kv_write against a row-by-row reference, bit for bit, and in place on donated pools."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import Device
from pallas_kernels.kv_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.kv_write.contract import kv_write
from pallas_kernels.kv_write.reference import dense

CPU = Device("cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_land_where_they_are_sent(case: WriteCase) -> None:
    """Rows of page P, of a far page and of page -1 are dropped; nothing else changes."""
    inputs = make_inputs(case, seed=0)
    out = jax.jit(lambda *arrays: kv_write(*arrays, device=CPU))(*inputs)
    for actual, expected in zip(out, dense(*inputs), strict=True):
        assert np.array_equal(np.asarray(actual), expected)


def test_rows_are_cast_to_the_pools_dtype() -> None:
    k, v, new_k, new_v, page, offset = make_inputs(CASES[3], seed=1)
    rows = (new_k.astype(np.float32), new_v.astype(np.float32))
    out, _ = jax.jit(lambda *arrays: kv_write(*arrays, device=CPU))(k, v, *rows, page, offset)
    assert out.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(out), dense(k, v, new_k, new_v, page, offset)[0])


def test_donated_pools_are_written_in_place() -> None:
    """Two layers, written and then read: the compiled program aliases each pool and copies none."""
    pool = jax.ShapeDtypeStruct((64, 2, 16, 64), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)
    place = jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(pools: list, rows_TNE: jax.Array, page_T: jax.Array, offset_T: jax.Array) -> tuple[list, jax.Array]:
        written = []
        for k_PNKE, v_PNKE in pools:
            pair = kv_write(k_PNKE, v_PNKE, rows_TNE, rows_TNE, page_T, offset_T, device=CPU)
            rows_TNE = rows_TNE + pair[0][page_T, :, offset_T]
            written.append(pair)
        return written, rows_TNE

    jitted = jax.jit(step, donate_argnums=0)
    text = jitted.lower([(pool, pool), (pool, pool)], rows, place, place).compile().as_text()
    assert not re.findall(r"bf16\[64,2,16,64\]\S* copy\(", text)
    assert text.split("entry_computation_layout")[0].count("may-alias") + text.count("must-alias") >= 4


def test_arrays_that_do_not_belong_together() -> None:
    k, v, new_k, new_v, page, offset = make_inputs(CASES[0], seed=0)
    with pytest.raises(ValueError, match="new_v is"):
        kv_write(k, v, new_k, new_v[:, :1], page, offset, device=CPU)
    with pytest.raises(ValueError, match="one shape and dtype"):
        kv_write(k, v[:1], new_k, new_v, page, offset, device=CPU)
    with pytest.raises(ValueError, match="must be"):
        kv_write(k, v, new_k, new_v, page[:0], offset, device=CPU)
