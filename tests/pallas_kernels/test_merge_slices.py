"""merge_slices in the interpreter: every slice of a row by a CTA of its own, against the weighted mean in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.merge_slices import Form, merge_slice

FORMS = (Form(2, 2, 4, 128), Form(4, 4, 2, 256), Form(1 << 30, 4, 1, 128))
HEADS, PADDED, COLUMNS, FIRST, ITEMS = 5, 8, 256, 2, 12


def merge(part_IHR: np.ndarray, lse_IH: np.ndarray, items: int, turns: int) -> np.ndarray:
    """All slices of items FIRST .. FIRST + items - 1."""

    def kernel(part_r: Any, lse_r: Any, out_r: Any) -> None:
        def store(head: jax.Array, columns: Any, value: jax.Array) -> None:
            out_r.at[head, columns][...] = value

        work = {"first": jnp.int32(FIRST), "items": jnp.int32(items), "turn": lax.axis_index("turn"), "turns": turns}
        merge_slice(part_r, lse_r, store, heads=HEADS, **work, forms=FORMS)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((HEADS, COLUMNS), jnp.float32),
        grid=(turns,),
        grid_names=("turn",),
        interpret=plgpu.InterpretGPUParams(),
    )
    return np.asarray(call(part_IHR, lse_IH))


@pytest.mark.parametrize(("items", "turns"), [(2, 1), (2, 2), (3, 3), (4, 16), (7, 4), (9, 10)])
def test_slices_make_up_the_row(items: int, turns: int) -> None:
    """Fewer and more slices than pieces of heads; each form; items of other rows and padding heads are NaN."""
    rng = np.random.default_rng(items)
    part_IHR = np.full((ITEMS, PADDED, COLUMNS), np.nan, np.float32)
    lse_IH = np.full((ITEMS, PADDED), np.nan, np.float32)
    mine = slice(FIRST, FIRST + items)
    part_IHR[mine, :HEADS] = rng.normal(size=(items, HEADS, COLUMNS))
    lse_IH[mine, :HEADS] = rng.normal(scale=9.0, size=(items, HEADS))
    lse_IH[FIRST, 0] = -1e30  # an item of which a head has seen nothing
    weight_IH = np.exp2(lse_IH[mine, :HEADS].astype(np.float64))
    expected = (part_IHR[mine, :HEADS] * weight_IH[..., None]).sum(0) / weight_IH.sum(0)[:, None]
    check(merge(part_IHR, lse_IH, items, turns), expected.astype(np.float32))
