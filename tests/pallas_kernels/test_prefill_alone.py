"""The prefill kernels in the interpreter: a chunk's rows have the same bits at another place and without the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import difference
from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill import check as gqa
from pallas_kernels.mla_prefill import check as mla

H200 = Device("gpu", "9.0")
CHUNKS = ((0, 0, 70), (5, 64, 60), (0, 200, 30))  # two in one tile of rows, and keys of several blocks


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # queries of no chunk are NaN
@pytest.mark.parametrize("op", ["gqa_prefill", "mla_prefill"])
def test_b064_a_chunk_has_the_same_bits_alone(op: str) -> None:
    options = {"interpret": plgpu.InterpretGPUParams()}  # each CTA takes its time, with work or without
    if op == "gqa_prefill":
        case = gqa.PrefillCase(op, 200, CHUNKS, 1, 2, 64, 64, "bfloat16")
        found = difference(*gqa.alone(case, H200, tuning=gqa.mosaic_gpu.Tuning(ctas=2), **options)())
    else:
        latent = mla.PrefillCase(op, 200, CHUNKS, 2, page_tokens=64, dtype="bfloat16", **mla.DEEPSEEK)
        tuning = replace(mla.Tuning.of(latent.nope_dim + latent.value_dim), ctas=2)
        found = difference(*mla.alone(latent, H200, tuning=tuning, **options)())
    assert gqa.passes(found), found
