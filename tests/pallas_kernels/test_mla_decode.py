"""mla_decode against a dense fp32 reference: lengths at and beside page borders, hostile tables, NaN in stale rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.mla_decode.cases import CASES, DecodeCase, DecodeInputs, make_inputs
from pallas_kernels.mla_decode.contract import mla_decode
from pallas_kernels.mla_decode.reference import dense

CPU = Device("cpu")
TINY = {"heads": 2, "page_tokens": 16, "rank": 32, "rope_dim": 8}


def run(case: DecodeCase, inputs: DecodeInputs, device: Device = CPU) -> np.ndarray:
    """The op's XLA form under jit, as the models call it."""
    options = {"rank": case.rank, "scale": case.scale, "device": device, "implementation": "xla"}
    return np.asarray(jax.jit(lambda *arrays: mla_decode(*arrays, **options))(*inputs))


def expected(case: DecodeCase, inputs: DecodeInputs) -> np.ndarray:
    return dense(*inputs, rank=case.rank, scale=case.scale)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b145_lengths_beside_blocks_and_stale_rows(case: DecodeCase) -> None:
    """B145: any length, a pool full of NaN outside the live rows, rows of length 0."""
    inputs = make_inputs(case, seed=0)
    out = run(case, inputs)
    check(out, expected(case, inputs), label=case.name)
    assert not out[np.asarray(case.lengths) == 0].any()


def test_b145_long_length_in_the_blocks_of_a_gpu() -> None:
    """B145's 4092, one short of a page border after many pages, in the long key blocks of a GPU."""
    case = DecodeCase("long", (4092, 1, 4096), **TINY | {"page_tokens": 64})
    inputs = make_inputs(case, seed=1)
    check(run(case, inputs, Device("gpu", "9.0")), expected(case, inputs))


def test_rows_that_share_pages() -> None:
    """A prefix in common: two rows name the same pages, at different lengths."""
    case = DecodeCase("shared", (40, 33), **TINY)
    inputs = make_inputs(case, seed=2)
    inputs.table_BM[1] = inputs.table_BM[0]
    check(run(case, inputs), expected(case, inputs))


def test_neighbours_do_not_change_a_row() -> None:
    """Bitwise the same alone and beside longer neighbours."""
    case = DecodeCase("neighbours", (37, 400, 0, 90), **TINY)
    inputs = make_inputs(case, seed=3)
    alone = inputs._replace(length_B=np.where(np.arange(4) == 0, inputs.length_B, 0))
    assert np.array_equal(run(case, inputs)[0], run(case, alone)[0])


def test_several_tokens_are_as_many_calls() -> None:
    """Query token s sees what a call of its own would see, at its own length; one before the first gives zeros."""
    case = DecodeCase("3 tokens", (1, 2, 3, 17, 40), **TINY, tokens=3)
    inputs = make_inputs(case, seed=5)
    together = run(case, inputs)
    for token in range(3):
        seen = np.maximum(inputs.length_B - 2 + token, 0)
        alone = run(case, inputs._replace(q_BHL=inputs.q_BHL[:, token], length_B=seen))
        check(together[:, token], alone)
        assert not together[:, token][seen == 0].any()


def test_arrays_that_do_not_belong_together() -> None:
    q, latent, table, tokens = make_inputs(CASES[0], seed=0)
    options = {"rank": 32, "scale": 1.0, "device": CPU}
    with pytest.raises(ValueError, match="for these queries"):
        mla_decode(q[..., :32], latent, table, tokens, **options)
    with pytest.raises(ValueError, match="rank is 41, must be 1 to 40"):
        mla_decode(q, latent, table, tokens, **options | {"rank": 41})
    with pytest.raises(ValueError, match="must be one"):
        mla_decode(q.astype(jnp.bfloat16), latent, table, tokens, **options)
    with pytest.raises(ValueError, match="must be .B, H, L. or .B, S, H, L."):
        mla_decode(q[0], latent, table, tokens, **options)
    with pytest.raises(ValueError, match="has 9 query tokens a row, must be 1 to 8"):
        mla_decode(np.repeat(q[:, None], 9, axis=1), latent, table, tokens, **options)
    with pytest.raises(ValueError, match="must have 10 rows"):
        mla_decode(q, latent, table, tokens[:2], **options)


def test_the_cache_is_not_copied() -> None:
    """No temporary of the size of a dense gather of the whole table."""
    case = DecodeCase("big table", (20,) * 4, **TINY)
    q, latent, table, tokens = make_inputs(case, seed=4)
    table = np.resize(table, (4, 4096))
    call = jax.jit(lambda *arrays: mla_decode(*arrays, rank=32, scale=case.scale, device=CPU))
    memory = call.lower(q, latent, table, tokens).compile().memory_analysis()
    gathered_bytes = 4 * 4096 * latent[0].nbytes
    assert memory.temp_size_in_bytes < gathered_bytes / 50
