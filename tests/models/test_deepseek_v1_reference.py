"""The plain reference of the first DeepSeek MoE model: the committed golden is its, and its parts are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  names bfloat16 for numpy, which safetensors asks
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models import deepseek_v1_reference as reference

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_tiny" / "moe"
CONFIG = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
WEIGHTS = {name: value.astype(np.float32) for name, value in load_file(GOLDEN / "model.safetensors").items()}


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference at a position, relative to its largest logit."""
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


def test_the_golden_is_the_references() -> None:
    with np.load(GOLDEN / "reference.npz") as golden:
        for number in range(3):
            got = reference.logits(CONFIG, WEIGHTS, golden[f"ids_{number}"])
            assert worst(got, golden[f"logits_{number}"]) < 1e-5
        ids = np.concatenate([golden["greedy_prompt"], golden["greedy_ids"]])
        after_prompt = reference.logits(CONFIG, WEIGHTS, ids)[len(golden["greedy_prompt"]) - 1 : -1]
        assert after_prompt.argmax(-1).tolist() == golden["greedy_ids"].tolist()


def test_a_token_sees_no_later_one() -> None:
    ids = np.arange(5, 25)
    assert worst(reference.logits(CONFIG, WEIGHTS, ids[:9]), reference.logits(CONFIG, WEIGHTS, ids)[:9]) < 1e-5


def test_only_the_distance_of_positions_counts() -> None:
    x_HTE = np.random.default_rng(0).standard_normal((2, 6, 8), np.float32)
    turned_HTE = reference.rotate(np.broadcast_to(x_HTE[:, :1], x_HTE.shape), 10000.0)
    products = np.einsum("hte,hse->hts", turned_HTE, turned_HTE)
    np.testing.assert_allclose(products[:, 1:, 1:], products[:, :-1, :-1], rtol=1e-5, atol=1e-5)


def routed_by_hand(x_D: np.ndarray, norm_topk_prob: bool) -> np.ndarray:
    """One token through the first MoE layer, an expert at a time."""
    layer = "model.layers.1.mlp."
    scores = {e: float(np.exp(x_D @ row)) for e, row in enumerate(WEIGHTS[f"{layer}gate.weight"])}
    best = sorted(scores, key=lambda expert: -scores[expert])[: CONFIG["num_experts_per_tok"]]
    whole = sum(scores[e] for e in (best if norm_topk_prob else scores))
    pairs = [(1.0, f"{layer}shared_experts.")] + [(scores[e] / whole, f"{layer}experts.{e}.") for e in best]
    total = np.zeros_like(x_D)
    for share, name in pairs:
        gate, up = (WEIGHTS[f"{name}{part}_proj.weight"] @ x_D for part in ("gate", "up"))
        total += share * WEIGHTS[f"{name}down_proj.weight"] @ (gate * up / (1 + np.exp(-gate)))
    return total


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_token_gets_its_best_experts_and_the_shared_ones(norm_topk_prob: bool) -> None:
    x_TD = np.random.default_rng(1).standard_normal((7, CONFIG["hidden_size"]), np.float32)
    config = CONFIG | {"norm_topk_prob": norm_topk_prob}
    got = reference.experts(config, reference.below(WEIGHTS, "model.layers.1.mlp."), x_TD)
    want = np.stack([routed_by_hand(x_D, norm_topk_prob) for x_D in x_TD])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
