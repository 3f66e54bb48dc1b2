"""scripts/convert_checkpoint.py as a user meets it: exit codes, sentences, and what is left on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import convert as module
from jaxserve.errors import CheckpointError
from scripts import _verify_logits, convert_checkpoint
from tests.checkpoints import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "source", tiny.CONFIG, tiny.random_tensors(tiny.CONFIG), shards=2)


def test_as_a_program_from_another_folder(tmp_path: Path, source: Path) -> None:
    script = ROOT / "scripts" / "convert_checkpoint.py"
    command = [sys.executable, str(script), "source", "target", "--verify"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no bar where there is no terminal, and no warnings
    lines = done.stdout.splitlines()
    assert lines[0] == "target: 15 parameters, 0.000 GB bfloat16"
    assert lines[1] == "target: 15 stored arrays equal the source's"
    assert "logits" in lines[2] or "log-probabilities" in lines[2]


def test_a_second_run(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(source), str(tmp_path / "target")]
    assert convert_checkpoint.main(arguments) == 0
    capsys.readouterr()
    assert convert_checkpoint.main(arguments) == 0
    assert "converted already" in capsys.readouterr().out
    assert convert_checkpoint.main([*arguments, "--dtype", "float32"]) == 4
    assert "it holds bfloat16, asked for: float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"model_type": "mamba"}, 3, "model_type is 'mamba', supported: chatglm, deepseek, "),
        ({"num_hidden_layers": 3}, 4, "missing: model.layers.2."),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, object], code: int, words: str
) -> None:
    model = tiny.write_model(tmp_path / "model", tiny.CONFIG | config, tiny.random_tensors(tiny.CONFIG))
    assert convert_checkpoint.main([str(model), str(tmp_path / "target")]) == code
    error = capsys.readouterr().err
    assert error.startswith("convert_checkpoint: ") and words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_no_such_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_checkpoint.main([str(tmp_path / "x"), str(tmp_path / "target")]) == 4
    assert "no such file or directory" in capsys.readouterr().err


def test_a_converted_source(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_checkpoint.main([str(source), str(tmp_path / "target")]) == 0
    assert convert_checkpoint.main([str(tmp_path / "target"), str(tmp_path / "again")]) == 4
    assert "converted already" in capsys.readouterr().err


def test_interrupted(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(source), str(tmp_path / "target")]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_files", interrupt)
        assert convert_checkpoint.main(arguments) == 130
    assert "goes on from" in capsys.readouterr().err
    assert convert_checkpoint.main(arguments) == 0
    assert "going on with an unfinished conversion" in capsys.readouterr().err


def test_logits_are_judged() -> None:
    """`found[i]` is the log-probability of the token at i, so it belongs to the reference's row i - 1."""
    expected = np.log(np.array([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]))
    found = [None, {1: np.log(0.8)}, {0: np.log(0.6), 1: np.log(0.4)}]
    assert "equal" in _verify_logits.judge(expected, found, 1e-3)
    found[2] = {0: np.log(0.601)}
    with pytest.raises(CheckpointError, match="differ"):
        _verify_logits.judge(expected, found, 1e-3)
    with pytest.raises(CheckpointError, match="differ"):
        _verify_logits.judge(expected, [None, {1: float("nan")}, None], 1e-3)
    with pytest.raises(CheckpointError, match="2 positions"):
        _verify_logits.judge(expected, found[:2], 1e-3)
