"""gqa_decode against a dense fp32 reference: lengths at and beside page borders, hostile tables, NaN in stale rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.cases import CASES, DecodeCase, DecodeInputs, make_inputs
from pallas_kernels.gqa_decode.contract import gqa_decode
from pallas_kernels.gqa_decode.reference import dense

CPU = Device("cpu")


def run(case: DecodeCase, inputs: DecodeInputs) -> np.ndarray:
    """The op under jit, as the models call it."""
    return np.asarray(jax.jit(lambda *arrays: gqa_decode(*arrays, scale=case.scale, device=CPU))(*inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b145_lengths_beside_blocks_and_stale_rows(case: DecodeCase) -> None:
    """B145: any length, pools full of NaN outside the live rows, rows of length 0."""
    inputs = make_inputs(case, seed=0)
    out = run(case, inputs)
    check(out, dense(*inputs, scale=case.scale), label=case.name)
    assert not out[np.asarray(case.lengths) == 0].any()


def test_b145_long_length() -> None:
    """B145's 4092: one short of a page border after many key blocks."""
    case = DecodeCase("long", (4092, 1, 4096), kv_heads=1, group=2, head_dim=64, page_tokens=64)
    inputs = make_inputs(case, seed=1)
    check(run(case, inputs), dense(*inputs, scale=case.scale))


def test_rows_that_share_pages() -> None:
    """A prefix in common: two rows name the same pages, at different lengths."""
    case = DecodeCase("shared", (40, 33), kv_heads=2, group=2, head_dim=64, page_tokens=16)
    inputs = make_inputs(case, seed=2)
    inputs.table_BM[1] = inputs.table_BM[0]
    check(run(case, inputs), dense(*inputs, scale=case.scale))


def test_neighbours_do_not_change_a_row() -> None:
    """Bitwise the same alone and beside longer neighbours."""
    case = DecodeCase("neighbours", (37, 400, 0, 90), kv_heads=2, group=3, head_dim=64, page_tokens=16)
    q, k, v, table, tokens = make_inputs(case, seed=3)
    call = jax.jit(lambda *arrays: gqa_decode(*arrays, scale=case.scale, device=CPU))
    together = np.asarray(call(q, k, v, table, tokens))
    alone = np.asarray(call(q, k, v, table, np.where(np.arange(4) == 0, tokens, 0)))
    assert np.array_equal(together[0], alone[0])


def test_arrays_that_do_not_belong_together() -> None:
    q, k, v, table, tokens = make_inputs(CASES[0], seed=0)
    with pytest.raises(ValueError, match="must have one shape"):
        gqa_decode(q, k, v[:, :1], table, tokens, scale=1.0, device=CPU)
    with pytest.raises(ValueError, match="for these queries"):
        gqa_decode(q[..., :32], k, v, table, tokens, scale=1.0, device=CPU)
    with pytest.raises(ValueError, match="must be one"):
        gqa_decode(q.astype(jnp.bfloat16), k, v, table, tokens, scale=1.0, device=CPU)
    with pytest.raises(ValueError, match="must have 10 rows"):
        gqa_decode(q, k, v, table, tokens[:2], scale=1.0, device=CPU)
    with pytest.raises(ValueError, match=r"must be \[B, N, G, E\] or \[B, S, N, G, E\]"):
        gqa_decode(q[0], k, v, table, tokens, scale=1.0, device=CPU)
    with pytest.raises(ValueError, match="q has 9 query tokens a row, must be 1 to 8"):
        gqa_decode(np.stack([q] * 9, axis=1), k, v, table, tokens, scale=1.0, device=CPU)


def test_query_tokens_are_those_of_calls_of_their_own() -> None:
    """Token s of S gives what a call of one token gives at a length that ends with it."""
    case = DecodeCase("several", (5, 64, 66, 130), kv_heads=2, group=2, head_dim=64, page_tokens=16, tokens=3)
    inputs = make_inputs(case, seed=5)
    out = run(case, inputs)
    for token in range(3):
        alone = inputs._replace(q=inputs.q[:, token], length_B=inputs.length_B - 2 + token)
        check(out[:, token], run(case, alone), label=f"token {token}")


def test_the_cache_is_not_copied() -> None:
    """No temporary of the size of a dense gather of the whole table."""
    case = DecodeCase("big table", (20,) * 4, kv_heads=2, group=2, head_dim=64, page_tokens=16)
    q, k, v, table, tokens = make_inputs(case, seed=4)
    table = np.resize(table, (4, 4096))
    call = jax.jit(lambda *arrays: gqa_decode(*arrays, scale=case.scale, device=CPU))
    memory = call.lower(q, k, v, table, tokens).compile().memory_analysis()
    gathered_bytes = 4 * 4096 * k[0].nbytes
    assert memory.temp_size_in_bytes < gathered_bytes / 50
