"""The training state, its beginning, and how it is kept: Orbax beside a record of the run, while a machine is held."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from checkpoints.source import open_model
from demo_model.train.optimizer import BIAS
from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import SplitDecoder
from jaxserve.runtime.weights import random_weights

STATE, RECORD = "state", "run.json"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a step changes; weights in the order of the decoder's leaves."""

    weights: list[jax.Array]  # float32
    moments: optax.OptState  # of the weights that are no router biases


def trained(names: tuple[str, ...]) -> list[int]:
    """Which leaves the optimizer moves."""
    return [index for index, name in enumerate(names) if not name.endswith(BIAS)]


def compute_leaves(split: SplitDecoder, weights: list[jax.Array]) -> list[jax.Array]:
    """The weights in the decoder's own dtypes, but for the embedding, which stays in float32 (see `Matrix.score`)."""
    return [
        weight if name == "embed.weight" else weight.astype(leaf.dtype)
        for name, weight, leaf in zip(split.names, weights, split.leaves, strict=True)
    ]


def fresh_weights(split: SplitDecoder, seed: int) -> list[jax.Array]:
    """Random, as serving's dummy weights are; float32."""
    return [leaf.astype(jnp.float32) for leaf in random_weights(split, seed)]


def weights_from(split: SplitDecoder, folder: Path) -> list[jax.Array]:
    """Those of a checkpoint that serving can load, MTP layer included; float32."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=place)
        for name, leaf in zip(split.names, split.leaves, strict=True)
    }
    loaded = open_model(folder).load(wanted)
    return [loaded[name] for name in split.names]


def flat(state: TrainState) -> dict[str, jax.Array]:
    """The state's arrays under numbers: Orbax then needs to know nothing of optax."""
    return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves(state))}


def save(folder: Path, state: TrainState, record: dict[str, object]) -> None:
    """Keep the state as the folder's newest; the one before goes when this one is whole."""
    fresh, kept, old = (folder / f"{name}{STATE}" for name in ("new-", "", "old-"))
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir(parents=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((fresh / "arrays").resolve(), flat(state))
    (fresh / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    if kept.exists():
        os.rename(kept, old)
    os.rename(fresh, kept)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, like: TrainState) -> tuple[TrainState, dict[str, object]]:
    """The kept state and its record. Raises CheckpointError where there is none, or one of another model."""
    kept = folder / STATE
    if not (kept / RECORD).is_file():
        raise CheckpointError(f"--resume: {kept} holds no state of a run, expected: one that this script has saved")
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flat(like).items()}
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            arrays = checkpointer.restore((kept / "arrays").resolve(), wanted)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"--resume: {kept} is of another model or optimizer: {error}") from error
    leaves = [jnp.asarray(arrays[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), json.loads((kept / RECORD).read_text())
