"""mla_prefill against a dense fp32 reference, and against mla_decode: one question, two forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check, difference
from pallas_kernels.device import Device
from pallas_kernels.mla_decode.contract import mla_decode
from pallas_kernels.mla_prefill.cases import CASES, DEEPSEEK, TINY, PrefillCase, PrefillInputs, make_inputs
from pallas_kernels.mla_prefill.contract import mla_prefill
from pallas_kernels.mla_prefill.reference import dense

CPU, H200 = Device("cpu"), Device("gpu", "9.0")


def run(case: PrefillCase, inputs: PrefillInputs, device: Device = CPU) -> np.ndarray:
    """The op's XLA form under jit, as the models call it."""
    options = {"scale": case.scale, "device": device, "implementation": "xla"}
    return np.asarray(jax.jit(lambda *arrays: mla_prefill(*arrays, **options))(*inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b145_chunks_beside_blocks_and_stale_rows(case: PrefillCase) -> None:
    """B145: chunk borders anywhere, a pool full of NaN outside the live rows, unused chunks and packed rows."""
    inputs = make_inputs(case, seed=0)
    out = run(case, inputs)
    check(out, dense(*inputs, scale=case.scale), label=case.name)
    owned = np.zeros(case.tokens, bool)
    for start, tokens in zip(inputs.start_R, inputs.tokens_R, strict=True):
        owned[start : start + tokens] = True
    assert not out[~owned].any()


def test_the_tiles_and_blocks_of_a_gpu() -> None:
    """Run on the CPU: a whole chunk a tile, the whole table a block."""
    case = CASES[1]
    inputs = make_inputs(case, seed=1)
    check(run(case, inputs, H200), dense(*inputs, scale=case.scale))


def test_chunks_in_any_packed_order() -> None:
    """Chunk 0 need not come first in the packed rows."""
    case = PrefillCase("order", 64, ((30, 4, 20), (0, 0, 0)), heads=2, page_tokens=16, **TINY)
    inputs = make_inputs(case, seed=2)
    inputs.start_R[:], inputs.tokens_R[:] = (30, 3), (20, 10)
    inputs.table_RM[1], inputs.position_R[1] = inputs.table_RM[0], 14
    inputs.q_THE[3:13] = inputs.q_THE[30:40]
    check(run(case, inputs), dense(*inputs, scale=case.scale))


@pytest.mark.parametrize("device", [CPU, H200], ids=str)
def test_the_absorbed_form_agrees_to_1e_5(device: Device) -> None:
    """Every token of a chunk as a decode row: key_up into the query, value_up onto the weighted latents."""
    case = PrefillCase("one question", 24, ((0, 60, 20),), heads=5, page_tokens=16, **DEEPSEEK)
    q, latent, key_up, value_up, table, *places = inputs = make_inputs(case, seed=3)
    expanded = run(case, inputs, device)[:20]
    nope, rope = q[:20, :, : case.nope_dim], q[:20, :, case.nope_dim :]
    absorbed = np.concatenate([np.einsum("thn,hnr->thr", nope, key_up), rope], axis=-1)
    length = np.arange(61, 81, dtype=np.int32)
    options = {"rank": case.rank, "scale": case.scale, "device": device, "implementation": "xla"}
    latents = jax.jit(lambda *arrays: mla_decode(*arrays, **options))(absorbed, latent, np.repeat(table, 20, 0), length)
    found = difference(np.einsum("thr,hvr->thv", np.asarray(latents), value_up), expanded)
    assert found.element <= 1e-5 and not found.bad, found


def test_arrays_that_do_not_belong_together() -> None:
    q, latent, key_up, value_up, table, start, tokens, position = make_inputs(CASES[0], seed=0)
    places, options = (table, start, tokens, position), {"scale": 1.0, "device": CPU}
    with pytest.raises(ValueError, match="start is"):
        mla_prefill(q, latent, key_up, value_up, table, start[:2], tokens, position, **options)
    with pytest.raises(ValueError, match=r"must be \[1, at most"):
        mla_prefill(q, latent, np.repeat(key_up, 2, axis=0), value_up, *places, **options)
    with pytest.raises(ValueError, match="value_up is"):
        mla_prefill(q, latent, key_up, value_up[..., :3], *places, **options)
    with pytest.raises(ValueError, match=r"must be \[P, K, 32 \+ 8\]"):
        mla_prefill(q, latent[..., :39], key_up, value_up, *places, **options)
    with pytest.raises(ValueError, match="must be one"):
        mla_prefill(q, latent, key_up.astype(jnp.bfloat16), value_up, *places, **options)


def test_memory_is_that_of_a_tile_and_a_block() -> None:
    """The expanded keys of the whole table are never held."""
    case = PrefillCase("big table", 16, ((0, 20, 10),), heads=4, page_tokens=16, **TINY)
    inputs = make_inputs(case, seed=4)
    inputs = inputs._replace(table_RM=np.resize(inputs.table_RM, (1, 8192)))
    call = jax.jit(lambda *arrays: mla_prefill(*arrays, scale=case.scale, device=CPU))
    memory = call.lower(*inputs).compile().memory_analysis()
    expanded_bytes = 8192 * 16 * 4 * (24 + 16) * 4
    assert memory.temp_size_in_bytes < expanded_bytes / 50
