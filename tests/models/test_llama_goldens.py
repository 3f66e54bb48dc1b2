"""Logits of tiny Llamas, one for each branch of the architecture, against transformers' at every position.

The goldens come from scripts/make_goldens.py: configs and weights saved by transformers, fp32 logits computed by it.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.source import open_model
from jaxserve.layers.paged import Chunks, Paged
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import load_weights
from pallas_kernels.device import Device

GOLDENS = Path(__file__).parents[1] / "goldens" / "llama_tiny"
PAGE_TOKENS, NUM_PAGES = 16, 8
LIMIT = 1e-4  # max |a - b| / max |b| over a position


def logits_of(model_dir: Path, tokens: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """All positions' logits through the paged cache, the prompt cut into chunks; NaN in the cache to begin with."""
    source = open_model(model_dir)
    spec = model_spec(source.config)
    split = split_decoder(spec, jnp.dtype("float32"), make_mesh(jax.devices()))
    leaves = load_weights(split, source.load)
    shapes = spec.attention.cache_shapes(NUM_PAGES, PAGE_TOKENS)
    caches = [tuple(jnp.full(shape, jnp.nan) for shape in shapes)] * spec.num_layers
    table = np.array([5, 2, 7, 0])  # any order of pages

    @jax.jit
    def forward(leaves, caches, token_T, position_T, page_T):  # noqa: ANN001, ANN202
        count = token_T.shape[0]
        chunk = Chunks(jnp.asarray(table)[None], jnp.zeros(1, int), jnp.full(1, count), position_T[:1])
        nobody = jnp.zeros((1, len(table)), jnp.int32), jnp.zeros(1, jnp.int32)
        paged = Paged(Device("cpu"), "auto", page_T, position_T % PAGE_TOKENS, *nobody, chunk)
        model = split.merge(leaves)
        hidden, caches = model(token_T, position_T, caches, paged)
        return model.logits(hidden), caches

    out = []
    for first in range(0, len(tokens), chunk_tokens):
        part = tokens[first : first + chunk_tokens]
        positions = np.arange(first, first + len(part))
        logits, caches = forward(leaves, caches, part, positions, table[positions // PAGE_TOKENS])
        out.append(np.asarray(logits))
    return np.concatenate(out)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir()))
def test_logits_equal_transformers_at_every_position(name: str) -> None:
    reference = np.load(GOLDENS / name / "reference.npz")
    for number, chunk_tokens in ((0, 64), (1, 7)):
        ids, want = reference[f"ids_{number}"], reference[f"logits_{number}"]
        got = logits_of(GOLDENS / name, ids, chunk_tokens)[:, : want.shape[1]]
        error = np.abs(got - want).max(-1) / np.abs(want).max(-1)
        assert error.max() < LIMIT, f"position {error.argmax()}: {error.max():.2e}"


def test_the_comparison_sees_a_wrong_rope() -> None:
    reference = np.load(GOLDENS / "gqa" / "reference.npz")
    shifted = logits_of(GOLDENS / "gqa-yarn", reference["ids_0"], 64)[:, : reference["logits_0"].shape[1]]
    assert np.abs(shifted - reference["logits_0"]).max() > 10 * LIMIT
