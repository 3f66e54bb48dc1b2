"""open_model: what it recognises, what it says of everything else, and weights straight from files to devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.files import Kind, model_directory
from checkpoints.source import open_model
from jaxserve.errors import CheckpointError
from tests.checkpoints import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", tiny.CONFIG, tiny.random_tensors(tiny.CONFIG), shards=2)


def test_a_hugging_face_directory(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    source = open_model(str(model))
    assert (source.kind, source.config, source.dtype) == (Kind.HUGGING_FACE, tiny.CONFIG, "bfloat16")
    assert source.generation_config == {"eos_token_id": [2, 3]}
    assert source.tokenizer_dir is None
    (model / "tokenizer.json").write_text("{}")
    assert open_model(model).tokenizer_dir == model == model_directory(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("devices", [1, 2])
def test_weights_straight_to_devices(model: Path, devices: int, dtype: str) -> None:
    wanted = tiny.wanted(tiny.CONFIG, dtype, devices)
    found = open_model(model).load(wanted)
    tiny.assert_equal(found, tiny.expected(tiny.CONFIG, tiny.random_tensors(tiny.CONFIG)))
    for name, array in found.items():
        assert isinstance(array, jax.Array)
        assert (array.dtype, array.sharding) == (wanted[name].dtype, wanted[name].sharding)
        assert len(array.sharding.device_set) == devices


def test_rounding_to_bfloat16_is_to_nearest(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG, np.float32)
    model = tiny.write_model(tmp_path / "model", tiny.CONFIG | {"torch_dtype": "float32"}, tensors)
    found = open_model(model).load(tiny.wanted(tiny.CONFIG))
    for name, right in tiny.expected(tiny.CONFIG, tensors).items():
        host = np.asarray(found[name]).astype(np.float32)
        assert np.abs(host - right).max() <= np.abs(right).max() * 2**-8, name


def test_weights_are_asked_for_only_when_loading(tmp_path: Path) -> None:
    """A directory with a config alone serves random weights."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    source = open_model(tmp_path)
    assert source.config["hidden_size"] == 32
    with pytest.raises(CheckpointError, match="holds neither model.safetensors"):
        source.load(tiny.wanted(tiny.CONFIG))


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_model(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "no such file", "GGUF")
    refuse(tmp_path, "it holds nothing", "config.json")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path, "it holds notes.txt")
    refuse(tmp_path / "notes.txt", "not GGUF")
    (tmp_path / "x.partial").mkdir()
    refuse(tmp_path / "x.partial", "unfinished")


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        open_model(tmp_path)


def test_the_front_finds_tokenizers_without_jax() -> None:
    code = "import sys, checkpoints.files; assert not {'jax', 'orbax', 'tensorstore', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
