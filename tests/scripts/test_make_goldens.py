"""What scripts/make_goldens.py --check calls a difference, and that the committed folders are the script's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from scripts import make_goldens
from scripts._goldens_check import LIMIT, compare

GOLDENS = make_goldens.GOLDENS


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A copy of one committed folder, as if it had been made anew."""
    shutil.copytree(GOLDENS / "deepseek_v3_tiny" / "plain", tmp_path / "deepseek_v3_tiny" / "plain")
    return tmp_path / "deepseek_v3_tiny" / "plain"


def differences(made: Path) -> list[str]:
    """What the script says."""
    return compare(made.parents[1], GOLDENS)


def change_array(made: Path, name: str, relative: float) -> None:
    """Moves one number of an array by a part of the largest."""
    with np.load(made / "reference.npz") as reference:
        arrays = dict(reference)
    flat = arrays[name].reshape(-1)
    flat[3] += np.asarray(relative * np.abs(flat).max()).astype(flat.dtype)
    np.savez_compressed(made / "reference.npz", **arrays)


def test_the_same_files_are_no_difference(made: Path) -> None:
    assert differences(made) == []


def test_another_version_of_transformers_and_rounding_are_no_difference(made: Path) -> None:
    entry = json.loads((made / "config.json").read_text(encoding="utf-8"))
    (made / "config.json").write_text(json.dumps(entry | {"transformers_version": "6.0.0"}), encoding="utf-8")
    change_array(made, "logits_1", LIMIT / 3)
    assert differences(made) == []


def test_another_logit_is_a_difference(made: Path) -> None:
    change_array(made, "logits_1", 3 * LIMIT)
    (line,) = differences(made)
    assert line.startswith("deepseek_v3_tiny/plain/reference.npz: logits_1 differs by 3.0e-05")


def test_another_greedy_id_is_a_difference(made: Path) -> None:
    change_array(made, "greedy_ids", 0.5)
    assert differences(made) == ["deepseek_v3_tiny/plain/reference.npz: greedy_ids has other values"]


def test_another_bit_of_a_weight_is_a_difference(made: Path) -> None:
    content = bytearray((made / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (made / "model.safetensors").write_bytes(content)
    (line,) = differences(made)
    assert line.startswith("deepseek_v3_tiny/plain/model.safetensors: ") and line.endswith(" has other values")


def test_another_config_or_another_file_is_a_difference(made: Path) -> None:
    entry = json.loads((made / "config.json").read_text(encoding="utf-8"))
    entry["rope_parameters"]["rope_theta"] = 1e6
    (made / "config.json").write_text(json.dumps(entry), encoding="utf-8")
    (made / "more.json").write_text("{}", encoding="utf-8")
    assert differences(made) == [
        "deepseek_v3_tiny/plain/config.json: /rope_parameters/rope_theta is 1000000.0, and was 10000.0",
        "deepseek_v3_tiny/plain/more.json is not among the committed files",
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("echo 2.13.0+cpu 5.24.0", ""),
        ("echo 2.13.0 5.17.0", "which has transformers 5.17.0 in place of 5.24.0"),
        ("exit 1", "which lacks torch or transformers"),
    ],
)
def test_an_environment_must_have_the_versions(
    answer: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    assert make_goldens.unfit(tmp_path) == why
    if why:
        assert make_goldens.main(["--environment", str(tmp_path), "--family", "glm"]) != 0
        assert f"--environment is {tmp_path}, {why}" in capsys.readouterr().err


def test_each_committed_folder_is_of_a_family_that_the_script_knows() -> None:
    families = {*make_goldens.FAMILIES, "chatglm"} - {"smollm2"}
    assert {path.name for path in GOLDENS.glob("*_tiny")} == {f"{family}_tiny" for family in families}
    files = {"config.json", "generation_config.json", "model.safetensors", "reference.npz"}
    for folder in GOLDENS.glob("*_tiny/*"):
        assert {path.name for path in folder.iterdir()} == files, folder


def test_the_goldens_stay_small() -> None:
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()) < 4.5e6
