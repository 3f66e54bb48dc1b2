"""Logits of tiny models, one for each branch of each family, against transformers' at every position.

The goldens come from scripts/make_goldens.py: configs and weights saved by transformers, fp32 logits computed by it. A
position is compared in every form that a step can take: in one chunk, in several, by decoding, and beside others.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.source import open_model
from jaxserve.layers.paged import Chunks, Paged
from jaxserve.layers.rope import angles
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import FAMILIES, model_spec
from jaxserve.runtime.weights import load_weights
from pallas_kernels.device import Device
from tests.fakes.forward import PAGE_TOKENS, PagedForward, Piece

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = sorted(str(path.parent.relative_to(GOLDENS)) for path in GOLDENS.glob("*_tiny/*/reference.npz"))
WIDTH = 48
LIMIT = 2e-5  # max |a - b| / max |b| over a position; the README quotes it
OTHER_FORMS = {  # a model of each attention and router: the forms differ there and nowhere else
    "llama_tiny/gqa",
    "deepseek_v2_tiny/lite",
    "deepseek_v3_tiny/groups-yarn-mtp",
    "glm4_moe_lite_tiny/flash-mtp",
    "glm4_moe_tiny/qk-norm-mtp",
    "glm4_tiny/bias",
}


@functools.cache
def forward_of(name: str, dtype: str = "float32") -> PagedForward:
    """The model as the runtime loads it."""
    source = open_model(GOLDENS / name)
    mesh = make_mesh(jax.devices())
    split = split_decoder(model_spec(source.config), jnp.dtype(dtype), mesh)
    return PagedForward(split, load_weights(split, source.load), WIDTH)


def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "reference.npz"))


def error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Of each position."""
    return np.abs(got[:, : want.shape[1]] - want).max(-1) / np.abs(want).max(-1)


def test_every_family_has_goldens() -> None:
    assert {name.split("_tiny")[0] for name in NAMES} == set(FAMILIES)
    assert set(NAMES) >= OTHER_FORMS


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_at_every_position(name: str) -> None:
    wanted, forward = reference(name), forward_of(name)
    whole = error(forward.logits(wanted["ids_0"]), wanted["logits_0"])
    assert whole.max() < LIMIT, f"position {whole.argmax()}: {whole.max():.2e}"
    chunked = error(forward.logits(wanted["ids_1"], chunk_tokens=7, decode_from=14), wanted["logits_1"])
    assert chunked.max() < LIMIT, f"position {chunked.argmax()}: {chunked.max():.2e}"


@pytest.mark.parametrize("name", sorted(OTHER_FORMS))
def test_sequences_of_mixed_lengths_together(name: str) -> None:
    wanted, forward = reference(name), forward_of(name)
    numbers = [n for n in range(3) if f"ids_{n}" in wanted]
    for number, got in zip(numbers, forward.together([wanted[f"ids_{n}"] for n in numbers]), strict=True):
        found = error(got, wanted[f"logits_{number}"])
        assert found.max() < LIMIT, f"sequence {number}, position {found.argmax()}: {found.max():.2e}"


@pytest.mark.parametrize("name", [name for name in NAMES if "greedy_ids" in reference(name)])
def test_greedy_ids_are_those_of_transformers(name: str) -> None:
    wanted, forward = reference(name), forward_of(name)
    found, logits = [], forward.logits(wanted["greedy_prompt"])[-1]
    for at in range(len(wanted["greedy_prompt"]), len(wanted["greedy_prompt"]) + len(wanted["greedy_ids"])):
        found.append(int(logits.argmax()))
        (logits,) = forward.step([Piece(0, at, found[-1:], decodes=True)])[0]
    assert found == wanted["greedy_ids"].tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if "mtp_ids_0" in reference(name)])
def test_mtp_logits_equal_transformers(name: str) -> None:
    """From each token's hidden state and the token after it, the logits of the one after that."""
    wanted, source = reference(name), open_model(GOLDENS / name)
    split = split_decoder(model_spec(source.config), jnp.dtype("float32"), make_mesh(jax.devices()), with_mtp=True)
    leaves = load_weights(split, source.load)
    shapes = split.spec.attention.cache_shapes(3, PAGE_TOKENS)
    caches = [tuple(jnp.full(shape, jnp.nan) for shape in shapes)] * (split.spec.num_layers + 1)

    @jax.jit
    def forward(leaves: list[jax.Array], token_T: jax.Array) -> jax.Array:
        model, tokens = split.merge(leaves), token_T.shape[0]
        position_T, one = jnp.arange(tokens), jnp.zeros(1, jnp.int32)
        table_RM = jnp.arange(3)[None]
        chunks = Chunks(table_RM, one, one + tokens, one)
        where = (position_T // PAGE_TOKENS, position_T % PAGE_TOKENS, table_RM, one)
        paged = Paged(Device("cpu"), "auto", position_T >= 0, *where, chunks)
        hidden_TD, _ = model(token_T, position_T, caches[:-1], paged)
        next_TD = model.embed.look_up(jnp.roll(token_T, -1))  # the last row's is never compared, and nothing sees it
        cos_sin = angles(split.spec.attention.rope, position_T + 1)
        return model.logits(model.mtp[0](hidden_TD, next_TD, cos_sin, caches[-1], paged)[0])

    got = np.asarray(forward(leaves, jnp.asarray(wanted["ids_0"])))[:-1]
    found = error(got, wanted["mtp_logits_0"])
    assert found.max() < LIMIT, f"position {found.argmax()}: {found.max():.2e}"


@pytest.mark.parametrize("name", ["llama_tiny/gqa-llama3-tied", "deepseek_v2_tiny/lite"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    wanted = reference(name)
    found = error(forward_of(name, "bfloat16").logits(wanted["ids_0"], 7), wanted["logits_0"])
    assert LIMIT < np.median(found) < 0.03  # rounded to 8 bits, and not worse


def test_the_comparison_sees_another_model() -> None:
    wanted = reference("llama_tiny/gqa")
    other = forward_of("llama_tiny/gqa-yarn").logits(wanted["ids_0"])
    assert error(other, wanted["logits_0"]).max() > 10 * LIMIT
