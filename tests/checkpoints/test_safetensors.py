"""The strict safetensors reader: what it gives, and each kind of file it refuses, with file and reason."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.readers.safetensors import DTYPES, SafetensorsReader
from jaxserve.errors import CheckpointError
from tests.checkpoints import tiny

SHARD = "model-00003-of-00004.safetensors"


def sharded(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", tiny.CONFIG, tiny.random_tensors(tiny.CONFIG), shards=4)


@pytest.mark.parametrize("shards", [1, 4])
def test_every_tensor_comes_back(tmp_path: Path, shards: int) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", tiny.CONFIG, tensors, shards))
    assert reader.tensors.keys() == tensors.keys()
    for name, right in tensors.items():
        found = reader.read(name)
        assert (found.dtype, found.tobytes()) == (right.dtype, right.tobytes())
        assert (reader.tensors[name].shape, reader.tensors[name].dtype) == (right.shape, right.dtype)


def test_all_dtypes_and_odd_shapes(tmp_path: Path) -> None:
    tensors = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", {}, tensors))
    for name, right in tensors.items():
        assert reader.read(name).tobytes() == right.tobytes()
        assert reader.read(name).shape == right.shape


def test_what_we_write_others_read(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG, np.float32)
    tiny.write_file(tmp_path / "x.safetensors", tensors)
    other = load_file(tmp_path / "x.safetensors")
    assert {name: array.tobytes() for name, array in other.items()} == {n: a.tobytes() for n, a in tensors.items()}


def refuse(directory: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsReader(directory)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_b115_missing_shard_is_named(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    (model / SHARD).rename(model / "model-3.safetensors")
    refuse(model, SHARD, "missing")


def test_b115_directory_called_like_a_shard(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    (model / SHARD).unlink()
    (model / SHARD).mkdir()
    refuse(model, SHARD, "directory")


def test_b115_shard_without_a_tensor_of_the_index(tmp_path: Path) -> None:
    model = sharded(tmp_path)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = SHARD
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(model, SHARD, "model.layers.7.mlp.up_proj.weight")


@pytest.mark.parametrize("entry", ["../outside.safetensors", "/etc/passwd", ""])
def test_a_shard_lies_beside_its_index(tmp_path: Path, entry: str) -> None:
    model = sharded(tmp_path)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": entry}}))
    refuse(model, "index.json", repr(entry))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"x": 3}}'])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    model = sharded(tmp_path)
    (model / "model.safetensors.index.json").write_text(index)
    refuse(model, "index.json")


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "holds neither")


def whole_file(tmp_path: Path) -> tuple[Path, bytes]:
    model = tiny.write_model(tmp_path / "model", {}, {"a": np.ones((2, 4), np.float32), "b": np.ones(8, np.float16)})
    path = model / "model.safetensors"
    return path, path.read_bytes()


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "4 bytes": lambda data: data[:4],
    "nothing": lambda data: b"",
    "in the header": lambda data: data[:40],
    "1 byte short": lambda data: data[:-1],
    "1 byte long": lambda data: data + b"\0",
    "a page of zeros after it": lambda data: data + bytes(4096),
    "no JSON": lambda data: data[:8] + b"x" + data[9:],
    "no UTF-8": lambda data: data[:9] + b"\xff" + data[10:],
}


@pytest.mark.parametrize("cut", CUTS)
def test_b117_truncated_or_padded(tmp_path: Path, cut: str) -> None:
    path, data = whole_file(tmp_path)
    path.write_bytes(CUTS[cut](data))
    refuse(path.parent, "model.safetensors: ")


def test_b117_huge_header_allocates_nothing(tmp_path: Path) -> None:
    path, data = whole_file(tmp_path)
    path.write_bytes(struct.pack("<Q", 1 << 40) + data[8:])
    tracemalloc.start()
    refuse(path.parent, "model.safetensors", str(1 << 40))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "overlaps"),
    "the same span twice": ({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}, "overlaps"),
    "a hole": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [2], 8, 16)}, "hole"),
    "a hole at the start": ({"a": entry("F32", [3], 4, 16)}, "hole"),
    "beyond the file": ({"a": entry("F32", [8], 0, 32)}, "truncated"),
    "a rest": ({"a": entry("F32", [3], 0, 12)}, "too long"),
    "no tensors": ({}, "too long"),
    "span and shape differ": ({"a": entry("F32", [2, 2], 0, 12)}, "its span holds 12"),
    "backwards": ({"a": entry("F32", [4], 16, 0)}, "its span holds"),
    "negative": ({"a": entry("F32", [-4], -16, 0)}, "whole numbers"),
    "fractions": ({"a": entry("F32", [4.0], 0, 16)}, "whole numbers"),
    "booleans": ({"a": entry("U8", [True] * 4, 0, True)}, "whole numbers"),
    "unknown dtype": ({"a": entry("F13", [4], 0, 16)}, "cannot be read"),
    "no entry": ({"a": None}, "cannot be read"),
    "a shape that is none": ({"a": entry("F32", 4, 0, 16)}, "cannot be read"),
    "a product beyond 64 bits": ({"a": entry("F32", [1 << 40, 1 << 40, 0, 1], 0, 16)}, "its span holds"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_b117_header_that_lies(tmp_path: Path, kind: str) -> None:
    header, reason = HEADERS[kind]
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refuse(tmp_path, "model.safetensors: ", reason)


def test_b117_name_given_twice(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(2))
    refuse(tmp_path, "given twice")


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path, data = whole_file(tmp_path)
    reader = SafetensorsReader(path.parent)
    path.write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match="ended after"):
        reader.read("b")


def test_fingerprints_see_a_changed_tensor(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    one = SafetensorsReader(tiny.write_model(tmp_path / "one", tiny.CONFIG, tensors)).fingerprints()
    assert SafetensorsReader(tiny.write_model(tmp_path / "two", tiny.CONFIG, tensors)).fingerprints() == one
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + ml_dtypes.bfloat16(1)
    assert SafetensorsReader(tiny.write_model(tmp_path / "three", tiny.CONFIG, tensors)).fingerprints() != one
