"""latent_write against a row-by-row reference, bit for bit, and in place on a donated pool."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import Device
from pallas_kernels.latent_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.latent_write.contract import latent_write
from pallas_kernels.latent_write.reference import dense

CPU = Device("cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_land_where_they_are_sent(case: WriteCase) -> None:
    """Rows of page P, of a far page and of page -1 are dropped; nothing else changes."""
    inputs = make_inputs(case, seed=0)
    out = jax.jit(lambda *arrays: latent_write(*arrays, device=CPU))(*inputs)
    assert np.array_equal(np.asarray(out), dense(*inputs))


def test_rows_are_cast_to_the_pools_dtype() -> None:
    latent, new, page, offset = make_inputs(CASES[3], seed=1)
    out = jax.jit(lambda *arrays: latent_write(*arrays, device=CPU))(latent, new.astype(np.float32), page, offset)
    assert out.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(out), dense(latent, new, page, offset))


def test_a_donated_pool_is_written_in_place() -> None:
    """Two layers, written and then read: the compiled program aliases each pool and copies none."""
    pool = jax.ShapeDtypeStruct((64, 16, 48), jnp.bfloat16)
    rows, place = jax.ShapeDtypeStruct((8, 48), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(pools: list, rows_TL: jax.Array, page_T: jax.Array, offset_T: jax.Array) -> tuple[list, jax.Array]:
        written = []
        for latent_PKL in pools:
            written.append(latent_write(latent_PKL, rows_TL, page_T, offset_T, device=CPU))
            rows_TL = rows_TL + written[-1][page_T, offset_T]
        return written, rows_TL

    text = jax.jit(step, donate_argnums=0).lower([pool, pool], rows, place, place).compile().as_text()
    assert not re.findall(r"bf16\[64,16,48\]\S* copy\(", text)
    assert text.split("entry_computation_layout")[0].count("may-alias") + text.count("must-alias") >= 2


def test_arrays_that_do_not_belong_together() -> None:
    latent, new, page, offset = make_inputs(CASES[0], seed=0)
    with pytest.raises(ValueError, match="new is"):
        latent_write(latent, new[:, :8], page, offset, device=CPU)
    with pytest.raises(ValueError, match="page .* and offset .* must be"):
        latent_write(latent, new, page[:0], offset, device=CPU)
