"""gqa_prefill against a dense fp32 reference: packed chunks with and without prefixes, page borders, stale NaN rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill import xla
from pallas_kernels.gqa_prefill.cases import CASES, PrefillCase, PrefillInputs, make_inputs
from pallas_kernels.gqa_prefill.contract import gqa_prefill
from pallas_kernels.gqa_prefill.reference import dense

CPU = Device("cpu")


def run(case: PrefillCase, inputs: PrefillInputs) -> np.ndarray:
    """The op under jit, as the models call it."""
    return np.asarray(jax.jit(lambda *arrays: gqa_prefill(*arrays, scale=case.scale, device=CPU))(*inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b145_chunks_beside_blocks_and_stale_rows(case: PrefillCase) -> None:
    """B145: chunk borders anywhere, pools full of NaN outside the live rows, unused chunks and packed rows."""
    inputs = make_inputs(case, seed=0)
    out = run(case, inputs)
    expected = dense(*inputs, scale=case.scale)
    check(out, expected, label=case.name)
    owned = np.zeros(case.tokens, bool)
    for start, tokens in zip(inputs.start_R, inputs.tokens_R, strict=True):
        owned[start : start + tokens] = True
    assert not out[~owned].any()


def test_many_tiles_go_through_together_as_on_a_gpu() -> None:
    """The GPU's wave size, run on the CPU: tiles of several chunks in one key-block loop."""
    case = CASES[1]
    inputs = make_inputs(case, seed=1)
    call = jax.jit(lambda *arrays: xla.run(*arrays, scale=case.scale, device=Device("gpu", "9.0")))
    check(np.asarray(call(*inputs)), dense(*inputs, scale=case.scale))


def test_chunks_in_any_packed_order() -> None:
    """Chunk 0 need not come first in the packed rows."""
    case = PrefillCase("order", 64, ((30, 4, 20), (0, 0, 0)), kv_heads=2, group=2, head_dim=64, page_tokens=16)
    q, k, v, table, start, tokens, position = make_inputs(case, seed=2)
    start, tokens = np.array([30, 3], np.int32), np.array([20, 10], np.int32)
    table[1], position[1] = table[0], 14
    q[3:13] = q[30:40]
    inputs = PrefillInputs(q, k, v, table, start, tokens, position)
    check(run(case, inputs), dense(*inputs, scale=case.scale))


def test_decode_is_a_chunk_of_one_token() -> None:
    """A one-token chunk and gqa_decode are the same question."""
    case = PrefillCase("one token", 4, ((0, 30, 1), (0, 15, 1)), kv_heads=2, group=2, head_dim=64, page_tokens=16)
    inputs = make_inputs(case, seed=3)
    out = run(case, inputs)
    check(out[:2], dense(*inputs, scale=case.scale)[:2])
    assert np.isfinite(out).all()


def test_arrays_that_do_not_belong_together() -> None:
    q, k, v, table, start, tokens, position = make_inputs(CASES[0], seed=0)
    with pytest.raises(ValueError, match="start is"):
        gqa_prefill(q, k, v, table, start[:2], tokens, position, scale=1.0, device=CPU)
    with pytest.raises(ValueError, match="for these queries"):
        gqa_prefill(q[:, :1], k, v, table, start, tokens, position, scale=1.0, device=CPU)
