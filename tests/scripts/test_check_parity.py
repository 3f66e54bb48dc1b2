"""The comparison with transformers at real layer sizes, tried on goldens and on made-up errors."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve import environment
from scripts import check_parity
from scripts._parity_compare import compare, table
from scripts._parity_ours import Sizes, plan

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v2_tiny" / "lite"
LENGTHS = (30, 10)


def kept(prefix: str, i: int, logits: np.ndarray) -> dict[str, np.ndarray]:
    """As reference.npz has them, of all columns."""
    parts = {"values": logits, "argmax": logits.argmax(1), "largest": np.abs(logits).max(1)}
    return {f"{prefix}{name}_{i}": part for name, part in parts.items()}


def made_up(other_error: float, our_error: float, our_decode_error: float) -> tuple[dict, dict]:
    """Ours and the reference with such errors, relative to each position's largest logit."""
    random = np.random.default_rng(0)
    ours, reference = {}, {}
    for i, length in enumerate(LENGTHS):
        truth = random.normal(size=(length, 50)).astype(np.float32)
        largest = np.abs(truth).max(1, keepdims=True)
        decoded = np.arange(length) >= length - 4
        error = np.where(decoded, our_decode_error, our_error)[:, None]
        reference |= kept("float32_", i, truth) | kept("bfloat16_", i, truth + other_error * largest)
        ours |= kept("", i, truth - error * largest) | {f"decoded_{i}": decoded}
    return ours, reference


def test_figures_are_relative_to_the_largest_logit() -> None:
    report = compare(*made_up(0.01, 0.012, 0.005), "bfloat16", 2)
    assert report["faults"] == []
    assert report["all"]["positions"] == 40 and report["decode"]["positions"] == 8
    assert report["prefill"]["ours"] == {"median": 0.012, "p99": 0.012, "max": 0.012, "same_argmax": 1.0}
    assert report["decode"]["ours"]["max"] == pytest.approx(0.005, rel=1e-2)
    assert report["all"]["transformers"]["median"] == pytest.approx(0.01, rel=1e-2)


def test_a_few_decoded_positions_are_judged_by_themselves() -> None:
    report = compare(*made_up(0.01, 0.01, 0.02), "bfloat16", 2)
    assert report["faults"] == ["decode: the median error is 2.0e-02, allowed: 1.5 x 1.0e-02"]
    assert "NOT PASSED: decode" in table({"model": {"bfloat16": report}})


def test_one_position_is_enough_in_float32() -> None:
    ours, reference = made_up(0.0, 1e-5, 1e-5)
    assert compare(ours, reference, "float32", 2)["faults"] == []
    ours["values_1"][2, 7] += 3e-4 * reference["float32_largest_1"][2]
    faults = compare(ours, reference, "float32", 2)["faults"]
    assert [fault.split(":")[0] for fault in faults] == ["all", "prefill"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_does_not_pass(dtype: str) -> None:
    ours, reference = made_up(0.01, 0.0, 0.0)
    ours["values_0"][3, 3] = np.nan
    assert len(compare(ours, reference, dtype, 2)["faults"]) == 2


def test_other_choices_are_counted() -> None:
    ours, reference = made_up(0.01, 0.0, 0.0)
    ours["argmax_1"][:4] += 1
    assert compare(ours, reference, "bfloat16", 2)["all"]["ours"]["same_argmax"] == 0.9


def test_steps_feed_each_token_once_and_in_all_forms() -> None:
    sizes, lengths = Sizes(rows=8), [700, 130, 5, 1]
    steps = plan(lengths, sizes)
    fed = [[] for _ in lengths]
    for pieces in steps:
        assert sum(piece.tokens for piece in pieces) <= sizes.width
        assert [piece.decodes for piece in pieces] == sorted((piece.decodes for piece in pieces), reverse=True)
        for piece in pieces:
            fed[piece.sequence] += range(piece.start, piece.start + piece.tokens)
    assert fed == [list(range(length)) for length in lengths]
    forms = [{piece.decodes for piece in pieces} for pieces in steps]
    assert {True, False} in forms and {True} in forms and [not piece.decodes for piece in steps[0]] == [True] * 4


def test_cut_models_keep_their_dense_layers_and_lose_mtp() -> None:
    config = json.loads((check_parity.CONFIGS / "glm-4.7-flash" / "config.json").read_text())
    small = check_parity.cut(config, 4)
    assert (small["num_hidden_layers"], small["num_nextn_predict_layers"], small["first_k_dense_replace"]) == (4, 0, 1)
    assert check_parity.cut(small, 9)["num_hidden_layers"] == 4
    assert config["num_hidden_layers"] == 47


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lengths", *"123456789"], "--lengths: got 9 sequences, allowed: 8 at most"),
        (["--lengths", "0"], "--lengths: got 0, allowed: whole numbers from 1 up"),
        (["nowhere"], "CONFIG_DIR: got nowhere, which holds no config.json"),
        ([str(GOLDEN), str(GOLDEN)], "two folders have the same name"),
    ],
)
def test_bad_flags_get_a_sentence(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_parity.parse(flags)
    assert sentence in capsys.readouterr().err


def golden_run(folders: list[Path], wrong: float) -> None:
    """In place of the part with torch: the golden's weights and logits, `wrong` added to one of them."""
    (folder,) = folders
    golden = np.load(GOLDEN / "reference.npz")
    shutil.copy(GOLDEN / "model.safetensors", folder)
    arrays = {"columns": np.arange(128)}
    for i in range(3):
        logits = golden[f"logits_{i}"].copy()
        logits[-1, 5] += wrong
        arrays |= {f"ids_{i}": golden[f"ids_{i}"]} | kept("float32_", i, logits)
    np.savez(folder / "reference.npz", **arrays)
    (folder / "torch.json").write_text(json.dumps({"versions": {}, "seconds": {}}))


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_our_programs_on_a_golden(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_parity, "run_torch", lambda folders, args: golden_run(folders, wrong))
    monkeypatch.setattr(environment, "prepare", lambda *_: None)  # this process has its settings already
    target = tmp_path / "out.json"
    flags = [str(GOLDEN), "--dtype", "float32", "--lengths", "40", "24", "5", "--work", str(tmp_path)]
    code = check_parity.main([*flags, "--json", str(target), "--commit", "abc"])
    result = json.loads(target.read_text())
    assert code == (1 if wrong else 0)
    assert (result["commit"], result["platform"]) == ("abc", "cpu")
    report = result["models"]["lite"]["float32"]
    assert report["native_kernels"] == {"mixed": 0, "decode": 0}
    assert {form: report[form]["positions"] for form in ("all", "decode")} == {"all": 69, "decode": 34}
    assert report["prefill"]["ours"]["max"] < 1e-4
    assert ("float32   passes" in capsys.readouterr().out) == (not wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_model_that_transformers_cannot_make_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = json.dumps({"failed": "ValueError: no such model"})
    write = lambda folders, args: (folders[0] / "torch.json").write_text(failure)  # noqa: E731
    monkeypatch.setattr(check_parity, "run_torch", write)
    monkeypatch.setattr(environment, "prepare", lambda *_: None)
    target = tmp_path / "out.json"
    assert check_parity.main([str(GOLDEN), "--json", str(target)]) == 1
    assert json.loads(target.read_text())["models"]["lite"]["failed"] == "transformers: ValueError: no such model"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not in this environment")
def test_the_part_with_torch(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = check_parity.ROOT / "scripts" / "_parity_torch.py"
    flags = ["--lengths", "9", "--columns", "20", "--seed", "0", "--device", "cpu", "--bfloat16", "--steady"]
    subprocess.run([sys.executable, str(script), str(tmp_path), *flags], check=True)
    assert "failed" not in json.loads((tmp_path / "torch.json").read_text())
    arrays = np.load(tmp_path / "reference.npz")
    away = np.abs(arrays["bfloat16_values_0"] - arrays["float32_values_0"]).max() / arrays["float32_largest_0"].max()
    assert arrays["float32_values_0"].shape == (9, 20) and 1e-5 < away < 0.2
