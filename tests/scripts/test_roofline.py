"""The physical limits: against those that were worked out when the goals were set, and what they are made of."""

from __future__ import annotations

import json

import pytest

from jaxserve.models.families import model_spec
from jaxserve.models.spec import ModelSpec
from scripts._bench_workloads import WORKLOADS, Ask
from scripts._commit import ROOT
from scripts._roofline import WORKLOAD_OF, Weights, decode_s, limit, prefill_s, serve_s

MODELS = ("deepseek-v2-lite", "glm-4-9b-0414", "glm-4.7-flash", "llama-2-13b")
# One NVIDIA H200, bfloat16; a dash was not worked out. These count a decode step for the first token too: up to 0.9 %.
STATED = """
c16_256_128_req_s 22.0 27.5 14.0 16.5
b1_1k_tpot_ms 1.08 3.84 1.58 5.81
b1_1k_ttft_ms 6.8 21.6 12.9 33.4
b16_1k_step_ms 5.58 3.99 8.82 8.73
b64_1k_step_ms 7.23 4.46 13.6 18.1
b256_1k_step_ms 8.66 6.32 16.2 -
b16_32k_step_ms 9.03 - 14.8 -
prefill_8x8192_tok_s 141000 41600 75500 -
prefill_16x4000_tok_s - - - 29200
prefill_16x32k_tok_s 87700 - 35400 -
thr_512x_1k_256_tok_s 17300 9125 10000 -
thr_128x_1k_256_tok_s - - - 2531
"""
CASES = [
    (model, key, float(value))
    for key, *values in (line.split() for line in STATED.strip().splitlines())
    for model, value in zip(MODELS, values, strict=True)
    if value != "-"
]


def spec(model: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / "scripts" / "configs" / model / "config.json").read_text()))


@pytest.mark.parametrize(("model", "key", "stated"), CASES)
def test_limits_are_the_stated_ones(model: str, key: str, stated: float) -> None:
    assert limit(spec(model), key) == pytest.approx(stated, rel=0.01)


def test_every_figure_has_a_limit() -> None:
    assert set(WORKLOAD_OF) == {key for workload in WORKLOADS.values() for key in workload.keys}
    assert all(limit(spec("deepseek-v2-lite"), key) > 0 for key in WORKLOAD_OF)
    with pytest.raises(KeyError):
        limit(spec("deepseek-v2-lite"), "b2_1k_step_ms")


def test_weights_are_those_that_a_pass_touches() -> None:
    """By hand for V2-Lite: one token passes 6 of 64 experts in 26 of 27 layers; many tokens touch them all."""
    weights = Weights.of(spec("deepseek-v2-lite"))
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    always = 27 * attention + 3 * 2048 * 10944 + 26 * (2048 * 64 + 3 * 2048 * 2816)
    expert, head = 3 * 2048 * 1408, 2048 * 102400
    assert (weights.always, weights.expert, weights.head) == (always, expert, head)
    assert weights.read_bytes(1) == pytest.approx(2 * (always + head + 26 * 6 * expert))
    assert weights.read_bytes(4096) == pytest.approx(2 * (always + head + 26 * 64 * expert))
    assert weights.cached_bytes == 2 * 27 * 576


def test_the_slower_of_bytes_and_operations_counts() -> None:
    """A step of few sequences waits for weights, a long prompt for products."""
    weights = Weights.of(spec("glm-4-9b-0414"))
    assert decode_s(weights, 1, 0) == pytest.approx(weights.read_bytes(1) / 4.58e12)
    tokens = 8192
    products = 2 * (tokens * weights.used + tokens**2 / 2 * 40 * 2 * 4096 + weights.head)
    assert prefill_s(weights, [Ask(tokens, 1)]) == pytest.approx(products / 790e12)


def test_sequences_that_do_not_fit_wait() -> None:
    """Llama's cache holds 97 of 128 requests of 1280 tokens: a third of a wave more steps."""
    weights = Weights.of(spec("llama-2-13b"))
    asks = [Ask(1024, 256)] * 128
    steps_s = serve_s(weights, asks) - prefill_s(weights, asks)
    assert steps_s == pytest.approx(255 * 128 / 97 * decode_s(weights, 97, 1152))
