"""Training mode against serving: one set of modules and weights, and the same logits, whatever stands between."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demo_model.train.loss import hidden_states, losses
from jaxserve.layers.rows import Rows
from jaxserve.models.decoder import SplitDecoder, split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import random_weights
from tests.fakes.forward import PagedForward
from tests.house.source import ROOT

CONFIG = json.loads((ROOT / "checkpoints" / "demo" / "config.json").read_text())
BOS = CONFIG["bos_token_id"]
SMALL = {"vocab_size": 256, "num_hidden_layers": 3}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.8}


def model(dtype: str = "float32", **changed: object) -> tuple[SplitDecoder, list[jax.Array]]:
    """Random weights, spread widely enough that layers and routers say something."""
    split = split_decoder(model_spec(CONFIG | SMALL | changed), jnp.dtype(dtype), with_mtp=True)
    leaves = random_weights(split, seed=3)
    biased = [name.endswith("router_bias") for name in split.names]
    spread = np.random.default_rng(1).normal(size=8).astype(np.float32) * 0.1
    return split, [
        jnp.asarray(spread) if bias else leaf * 3 if leaf.ndim > 1 else leaf
        for leaf, bias in zip(leaves, biased, strict=True)
    ]


def documents(*lengths: int) -> list[list[int]]:
    """Random ids, a BOS in front of each."""
    rng = np.random.default_rng(7)
    return [[BOS, *rng.integers(2, SMALL["vocab_size"], length - 1).tolist()] for length in lengths]


@pytest.mark.parametrize("changed", [{}, {"rope_scaling": YARN, "q_lora_rank": None}, {"tie_word_embeddings": False}])
def test_logits_are_those_of_serving(changed: dict[str, object]) -> None:
    """Documents side by side in a row, each alone in serving; in float32, to the rounding of sums."""
    split, leaves = model(**changed)
    texts = documents(19, 30, 15)
    row_IC = jnp.asarray([sum(texts, []), sum(texts[::-1], [])], jnp.int32)

    @jax.jit
    def forward(leaves: list[jax.Array]) -> jax.Array:
        decoder = split.merge(leaves)
        return decoder.logits(hidden_states(decoder, row_IC, Rows.of(row_IC, BOS))[0])

    got = np.asarray(forward(leaves)).reshape(2, row_IC.shape[1], -1)
    serving_split = split_decoder(split.spec, jnp.dtype(jnp.float32))
    kept = dict(zip(split.names, leaves, strict=True))
    paged = PagedForward(serving_split, [kept[name] for name in serving_split.names], width=32)
    want = [paged.logits(text) for text in texts]
    assert np.ptp(want[0]) > 1
    for row, order in zip(got, (want, want[::-1]), strict=True):
        np.testing.assert_allclose(row, np.concatenate(order), atol=2e-5 * np.abs(np.concatenate(order)).max(), rtol=0)


def test_positions_start_again_with_each_document() -> None:
    token_IC = jnp.asarray([[5, 6, BOS, 7, 8, BOS, BOS, 9]], jnp.int32)
    rows = Rows.of(token_IC, BOS)
    assert rows.position_T().tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    assert rows.document_IC.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]


def test_every_parameter_learns() -> None:
    """Gradients are finite everywhere and nowhere all zero; the router bias is given the load of its layer."""
    split, leaves = model()
    row_IC = jnp.asarray([sum(documents(29, 35), []), sum(documents(40, 24), [])], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(leaves: list[jax.Array]) -> jax.Array:
        return losses(split.merge(leaves), row_IC, jnp.ones_like(row_IC), BOS).total(0.3)

    for name, found in zip(split.names, gradient(leaves), strict=True):
        values = np.asarray(found)
        assert np.isfinite(values).all(), name
        assert np.abs(values).max() > 0, name
        if name.endswith("router_bias"):
            assert values.sum() == row_IC.size * CONFIG["num_experts_per_tok"], name
        elif values.ndim > 1 and not name.startswith("embed") and "experts" not in name:
            assert (np.abs(values).reshape(len(values), -1).max(axis=1) > 0).all(), name


def test_the_gradient_is_that_of_the_loss() -> None:
    """Along one random direction, by differences of the loss; all experts are chosen, since a new choice is a step."""
    split, leaves = model(num_experts_per_tok=8, topk_group=4)
    row_IC = jnp.asarray([sum(documents(21, 11), [])], jnp.int32)
    loss = jax.jit(lambda leaves: losses(split.merge(leaves), row_IC, jnp.ones_like(row_IC), BOS).total(0.3))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    still = [name.endswith("router_bias") for name in split.names]  # its gradient is the load
    way = [
        jax.random.normal(key, leaf.shape) * (not is_still)
        for leaf, key, is_still in zip(leaves, keys, still, strict=True)
    ]
    slope = sum(float((a * b).sum()) for a, b in zip(jax.grad(loss)(leaves), way, strict=True))
    step = 1e-4
    ends = [float(loss([leaf + at * part for leaf, part in zip(leaves, way, strict=True)])) for at in (step, -step)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.03)


def test_mtp_predicts_the_second_token_from_the_first() -> None:
    """Its output at t changes with the tokens up to t+1 and with none after; no target lies in another document."""
    split, leaves = model()
    (text,) = documents(24)
    decoder = split.merge(leaves)

    def mtp(tokens: list[int]) -> np.ndarray:
        row_IC = jnp.asarray([tokens], jnp.int32)
        return np.asarray(hidden_states(decoder, row_IC, Rows.of(row_IC, BOS))[1])

    before, changed = mtp(text), mtp([*text[:10], 255 - text[10] % 200, *text[11:]])
    moved = np.abs(before - changed).max(axis=1)
    assert moved[:9].max() < 1e-6
    assert (moved[9:23] > 1e-3).all()
    row_IC = jnp.asarray([sum(documents(5, 3, 2), [])], jnp.int32)
    found = losses(decoder, row_IC, jnp.ones_like(row_IC), BOS)
    assert (float(found.main_tokens), float(found.mtp_tokens)) == (4 + 2 + 1, 3 + 1 + 0)
