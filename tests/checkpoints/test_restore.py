"""Restoring a converted checkpoint: on any devices, and only into the model that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from checkpoints.convert import convert, plan
from checkpoints.files import Kind
from checkpoints.restore import restore, stored_tensors
from checkpoints.source import open_model
from jaxserve.errors import CheckpointError
from tests.checkpoints import tiny

WIDE = tiny.CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 8}  # heads for 8 devices


def converted(folder: Path, config: Mapping[str, Any] = tiny.CONFIG) -> Path:
    source = tiny.write_model(folder / "source", config, tiny.random_tensors(config))
    convert(plan(source, folder / "target", "auto"))
    return folder / "target"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("wide"), WIDE)


def test_a_converted_checkpoint_opens_like_any_model(narrow: Path) -> None:
    source = open_model(narrow)
    assert (source.kind, source.dtype, source.config) == (Kind.CONVERTED, "bfloat16", tiny.CONFIG)
    found = source.load(tiny.wanted(tiny.CONFIG))
    tiny.assert_equal(found, tiny.expected(tiny.CONFIG, tiny.random_tensors(tiny.CONFIG)))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_b129_restore_on_any_number_of_devices(wide: Path, devices: int) -> None:
    wanted = tiny.wanted(WIDE, devices=devices)
    found = open_model(wide).load(wanted)
    tiny.assert_equal(found, tiny.expected(WIDE, tiny.random_tensors(WIDE)))
    assert {name: array.sharding for name, array in found.items()} == {n: w.sharding for n, w in wanted.items()}
    assert len(found["layers.0.mlp.gate_up"].sharding.device_set) == devices


def refuse(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        restore(path / "weights", wanted)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_b127_restore_to_more_layers_names_what_is_missing(narrow: Path) -> None:
    refuse(narrow, tiny.wanted(tiny.CONFIG | {"num_hidden_layers": 3}), "missing: layers.2.attention.out, layers.2.")


def test_b127_restore_to_fewer_layers_names_what_is_left_over(narrow: Path) -> None:
    refuse(narrow, tiny.wanted(tiny.CONFIG | {"num_hidden_layers": 1}), "extra: layers.1.attention.out, ")


def test_b127_a_renamed_leaf(narrow: Path) -> None:
    wanted = tiny.wanted(tiny.CONFIG)
    wanted["final_norm.scale"] = wanted.pop("norm.scale")
    refuse(narrow, wanted, "missing: final_norm.scale", "extra: norm.scale")


def test_b127_a_transposed_shape_of_equal_size(narrow: Path) -> None:
    wanted = tiny.wanted(tiny.CONFIG)
    old = wanted["head.weight"]
    wanted["head.weight"] = jax.ShapeDtypeStruct(old.shape[::-1], old.dtype, sharding=old.sharding)
    refuse(narrow, wanted, "misshapen: head.weight bfloat16[64, 32], expected [32, 64]")


def test_a_dtype_that_no_cast_makes(narrow: Path) -> None:
    """Orbax itself would cast bfloat16 to int8 without a word."""
    wanted = tiny.wanted(tiny.CONFIG)
    old = wanted["norm.scale"]
    wanted["norm.scale"] = jax.ShapeDtypeStruct(old.shape, np.int8, sharding=old.sharding)
    refuse(narrow, wanted, "norm.scale bfloat16[32], expected int8")


def test_restoring_in_another_float(narrow: Path) -> None:
    found = restore(narrow / "weights", tiny.wanted(tiny.CONFIG, "float32"))
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    tiny.assert_equal(found, tiny.expected(tiny.CONFIG, tiny.random_tensors(tiny.CONFIG)))


def test_no_weights_or_unfinished_ones(tmp_path: Path, narrow: Path) -> None:
    refuse(tmp_path, tiny.wanted(tiny.CONFIG), str(tmp_path), "not a whole Orbax checkpoint")
    ocp.partial.save(tmp_path / "weights", {"norm.scale": np.ones(32)})
    refuse(tmp_path, tiny.wanted(tiny.CONFIG), str(tmp_path), "not a whole Orbax checkpoint")


def test_shapes_are_read_without_devices(narrow: Path) -> None:
    assert str(stored_tensors(narrow / "weights")["head.weight"]) == "bfloat16[64, 32]"
