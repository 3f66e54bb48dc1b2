"""One model on many meshes of 8 forced CPU devices: the same logits and greedy ids as on one device.

A covering set of meshes runs always, all of them under `-m nightly`. The compiled step holds the collectives that the
modules ask for and no others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.source import open_model
from jaxserve.errors import ConfigError
from jaxserve.mesh import Placement, make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import load_weights
from tests.fakes.forward import PagedForward, Piece

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = ("deepseek_v3_tiny/groups-yarn-mtp", "glm4_moe_tiny/qk-norm-mtp", "glm4_tiny/bias")
LIMIT = 2e-4

type Sizes = tuple[int, int, int]  # tensor, expert, data: as make_mesh takes them

ALL: list[Sizes] = [sizes for sizes in product((1, 2, 4, 8), (1, 2, 4), (1, 2)) if 1 < math.prod(sizes) <= 8]
COVERING: tuple[Sizes, ...] = ((2, 1, 1), (8, 1, 1), (4, 1, 2), (2, 4, 1), (1, 4, 2), (2, 2, 2))
MESHES = [pytest.param(sizes, marks=[] if sizes in COVERING else [pytest.mark.nightly], id=str(sizes)) for sizes in ALL]


def forward_on(name: str, sizes: Sizes) -> PagedForward:
    source, mesh = open_model(GOLDENS / name), make_mesh(jax.devices(), *sizes)
    split = split_decoder(model_spec(source.config), jnp.dtype("float32"), mesh)
    return PagedForward(split, load_weights(split, source.load), 48, mesh)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / name / "reference.npz"))


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_ids_are_those_of_one_device(name: str, sizes: Sizes) -> None:
    wanted, forward = reference(name), forward_on(name, sizes)
    got = forward.logits(wanted["ids_1"], chunk_tokens=11, decode_from=20)
    error = np.abs(got - wanted["logits_1"]).max(-1) / np.abs(wanted["logits_1"]).max(-1)
    assert error.max() < LIMIT, f"position {error.argmax()}: {error.max():.2e}"
    found, logits = [], forward.logits(wanted["greedy_prompt"])[-1]
    for at in range(len(wanted["greedy_prompt"]), len(wanted["greedy_prompt"]) + 24):
        found.append(int(logits.argmax()))
        (logits,) = forward.step([Piece(0, at, found[-1:], decodes=True)])[0]
    assert found == wanted["greedy_ids"][:24].tolist()


OTHERS = (
    "chatglm_tiny/chat",
    "deepseek_tiny/moe",
    "deepseek_v2_tiny/groups",
    "glm4_moe_lite_tiny/flash-mtp",
    "glm_tiny/chat",
    "llama_tiny/gqa",
)
TWO_SHARED = ("deepseek_tiny/moe", "deepseek_v2_tiny/lite")


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, (2, 2, 2)) for name in OTHERS), *((name, (2, 1, 1)) for name in TWO_SHARED)]
)
def test_every_other_family_on_one_mesh_and_two_shared_experts_on_another(name: str, sizes: Sizes) -> None:
    wanted, forward = reference(name), forward_on(name, sizes)
    got = forward.logits(wanted["ids_1"], chunk_tokens=11, decode_from=20)
    error = np.abs(got - wanted["logits_1"]).max(-1) / np.abs(wanted["logits_1"]).max(-1)
    assert error.max() < LIMIT, f"position {error.argmax()}: {error.max():.2e}"


def test_the_covering_set_has_every_size_of_every_axis() -> None:
    assert len(ALL) == 14 and set(COVERING) <= set(ALL)
    for axis, sizes in enumerate(((1, 2, 4, 8), (1, 2, 4), (1, 2))):
        assert {mesh[axis] for mesh in COVERING} == set(sizes)


def collectives(forward: PagedForward) -> dict[str, int]:
    """Of the compiled step, by kind."""
    token_T, rows = np.zeros(forward.width, np.int32), np.zeros(4, np.int32)
    chunks = (forward.table_RM, rows, rows, rows)
    arguments = (forward.leaves, forward.caches, token_T, token_T, token_T, (forward.table_RM, rows), chunks)
    text = forward.forward.lower(*arguments).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(MODELS[0], (2, 4, 1)), (MODELS[0], (8, 1, 1)), (MODELS[1], (2, 2, 2)), (MODELS[2], (8, 1, 1))],
)
def test_a_layer_adds_up_twice_and_moves_nothing_else(name: str, sizes: Sizes) -> None:
    """Attention and feed-forward block once each, and the embedding once: no weight or cache is ever gathered."""
    forward = forward_on(name, sizes)
    found = collectives(forward)
    assert found.pop("all-reduce") == 2 * forward.split.spec.num_layers + 1
    assert not any(found.values()), found


def test_weights_and_caches_are_cut_where_they_can_be() -> None:
    split = forward_on(MODELS[0], (2, 4, 1)).split
    shard = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in zip(split.names, split.leaves, strict=True)}
    whole = {name: leaf.shape for name, leaf in zip(split.names, split.leaves, strict=True)}
    assert shard["layers.1.mlp.experts_gate_up"] == (4, 2, 8, 32)  # 16 experts over 4, their 16 wide over 2
    assert shard["layers.1.attention.q"][0] == 1 and whole["layers.1.attention.q"][0] == 8
    assert shard["embed.weight"] == (16, 32)
    assert shard["layers.1.attention.down"] == whole["layers.1.attention.down"]  # the latent is everybody's


def test_shared_experts_are_among_the_others_where_each_device_has_all_of_those() -> None:
    for sizes in COVERING:
        split = forward_on(MODELS[0], sizes).split
        shapes = {name: leaf.shape for name, leaf in zip(split.names, split.leaves, strict=True)}
        apart = sizes[1] > 1
        assert shapes["layers.1.mlp.experts_gate_up"] == (16 if apart else 17, 2, 16, 32)
        assert ("layers.1.mlp.shared.down" in shapes) == apart
        assert split.spec.moe is not None and split.spec.moe.grouped_shared == (0 if apart else 1)


@pytest.mark.parametrize(
    ("change", "placement"),
    [
        ({"shared_width": 24}, Placement()),  # no multiple of 16
        ({"width": 15, "shared_width": 30}, Placement(tensor=2)),  # cut over two devices, and each routed one whole
        ({}, Placement(expert=2)),
    ],
)
def test_shared_experts_that_stand_apart(change: dict[str, int], placement: Placement) -> None:
    spec = model_spec(open_model(GOLDENS / MODELS[0]).config).moe
    assert spec is not None
    joined = spec.fitted(Placement(tensor=2))
    assert joined.grouped_shared == 1 and joined.fitted(Placement(tensor=2)) == joined
    assert replace(spec, **change).fitted(placement).grouped_shared == 0


@pytest.mark.parametrize(
    ("name", "sizes", "sentence"),
    [
        ("llama_tiny/gqa", (3, 1, 1), "--tensor-parallel-size: got 3, allowed: what divides the model's 4 attention"),
        ("glm4_moe_tiny/air", (1, 3, 1), "--expert-parallel-size: got 3, allowed: what divides the model's 8 experts"),
        ("glm4_tiny/bias", (16, 1, 1), "--data-parallel-size x --expert-parallel-size x --tensor-parallel-size: got"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name: str, sizes: Sizes, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        forward_on(name, sizes)
    assert str(error.value).startswith(sentence)


def test_the_first_choice_that_divides_is_taken() -> None:
    placement = Placement(data=1, expert=2, tensor=4)
    assert placement.axes("heads", 16) == ("expert", "tensor")
    assert placement.axes("heads", 20) == ("tensor",)
    assert placement.axes("vocab", 6) == ("expert",)
    assert placement.axes("vocab", 7) == placement.axes(None, 8) == ()
    assert Placement(data=2).axes("heads", 16) == ()
