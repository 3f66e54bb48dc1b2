"""bench_step.py from its command line to its file, on a tiny random model; the report can read what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.models.families import model_spec
from scripts._commit import ROOT
from scripts._report import profiles
from tests.fakes.tiny import CONFIG


def bench_step(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_step.py"), str(model), "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.timeout(300)  # compiles its programs
def test_a_step_is_recorded_with_its_date_and_commit(tmp_path: Path) -> None:
    model, results = tmp_path / "tiny-model", tmp_path / "steps.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    results.write_text(json.dumps({"other": {"model": "other"}}))
    flags = (
        "--rows",
        "1",
        "3",
        "--context",
        "64",
        "--variants",
        "default",
        "--kernels",
        "5",
        "--commit",
        "abc",
        "--prefill",
        "100",
    )
    done = bench_step(model, *flags, "--commit", "abc", "--json", str(results))
    assert done.returncode == 0, done.stderr[-2000:]
    table = json.loads(results.read_text())
    assert table["other"] == {"model": "other"}
    entry = table["tiny-model"]
    assert (entry["model"], entry["context_tokens"], entry["commit"]) == ("tiny-model", 64, "abc")
    run = entry["variants"]["default"]
    assert run["decode_1"]["step_ahead"] > 0 and run["decode_3"]["step_ahead"] > 0
    assert run["prefill_100"]["step_ahead"] > 0
    assert run["decode_1"]["kernels"]["all"] == [0.0, 0]  # the CPU's profile holds no kernels: nothing to report
    assert profiles("tiny-model", model_spec(CONFIG), table, "NVIDIA H200") == []


def test_a_file_that_is_no_table_ends_it_at_once(tmp_path: Path) -> None:
    results = tmp_path / "steps.json"
    results.write_text("[1]")
    done = bench_step(tmp_path, "--json", str(results))
    assert done.returncode == 1 and "holds no table, allowed: a results file or a new one" in done.stderr
    assert results.read_text() == "[1]"


def test_a_run_that_fails_leaves_the_entry_that_was_there(tmp_path: Path) -> None:
    model, results = tmp_path / "tiny-model", tmp_path / "steps.json"
    model.mkdir()
    results.write_text(json.dumps({"tiny-model": {"model": "tiny-model", "commit": "earlier"}}))
    done = bench_step(model, "--variants", "default", "--json", str(results))
    assert done.returncode == 1 and "config.json" in done.stderr
    assert json.loads(results.read_text()) == {"tiny-model": {"model": "tiny-model", "commit": "earlier"}}
