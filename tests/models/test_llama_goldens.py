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
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import load_weights
from tests.fakes.forward import PagedForward

GOLDENS = Path(__file__).parents[1] / "goldens" / "llama_tiny"
WIDTH = 48
LIMIT = 1e-4  # max |a - b| / max |b| over a position


def forward_of(model_dir: Path, dtype: str = "float32") -> PagedForward:
    """The model as the runtime loads it."""
    source = open_model(model_dir)
    spec = model_spec(source.config)
    split = split_decoder(spec, jnp.dtype(dtype), make_mesh(jax.devices()))
    return PagedForward(split, spec, load_weights(split, source.load), WIDTH)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir()))
def test_logits_equal_transformers_at_every_position(name: str) -> None:
    reference, forward = np.load(GOLDENS / name / "reference.npz"), forward_of(GOLDENS / name)
    for number, chunk_tokens in ((0, WIDTH), (1, 7)):
        ids, want = reference[f"ids_{number}"], reference[f"logits_{number}"]
        got = forward.logits(ids, chunk_tokens)[:, : want.shape[1]]
        error = np.abs(got - want).max(-1) / np.abs(want).max(-1)
        assert error.max() < LIMIT, f"position {error.argmax()}: {error.max():.2e}"


def test_bfloat16_stays_near_float32() -> None:
    reference = np.load(GOLDENS / "gqa-llama3-tied" / "reference.npz")
    got = forward_of(GOLDENS / "gqa-llama3-tied", "bfloat16").logits(reference["ids_0"], 7)
    want = reference["logits_0"]
    error = np.abs(got[:, : want.shape[1]] - want).max(-1) / np.abs(want).max(-1)
    assert LIMIT < np.median(error) < 0.03 and error.max() < 0.1  # rounded to 8 bits, and not worse


def test_the_comparison_sees_another_model() -> None:
    reference = np.load(GOLDENS / "gqa" / "reference.npz")
    other = forward_of(GOLDENS / "gqa-yarn").logits(reference["ids_0"])[:, : reference["logits_0"].shape[1]]
    assert np.abs(other - reference["logits_0"]).max() > 10 * LIMIT
