"""The benchmark from its command line to its file, on a tiny random model and the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny import CONFIG

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--dtype", "float32", "--compile-cache-dir", "")


@pytest.mark.timeout(300)  # compiles its programs
def test_a_config_is_all_it_needs(tmp_path: Path) -> None:
    model, results = tmp_path / "tiny-model", tmp_path / "results.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    command = [sys.executable, str(ROOT / "scripts" / "bench_serve.py"), str(model), "--weights", "random", *ENGINE]
    command += ["--workloads", "c16_256_128,b1_1k", "--json", str(results), "--commit", "abc"]
    command += ["--report", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    entry = json.loads(results.read_text())["tiny-model"]
    assert entry["c16_256_128_tok_s"] == pytest.approx(128 * entry["c16_256_128_req_s"], rel=1e-3)
    assert entry["left_out"] == {"b1_1k": "needs 1281 tokens of context, max_model_len is 384"}
    measured = entry["measured"]["c16_256_128"]
    assert (measured["commit"], measured["dtype"], measured["weights"]) == ("abc", "float32", "random")
    assert measured["compilations_after_warmup"] == 0 and measured["host_us_per_step"] > 0
    assert measured["implementations"]["gqa_decode"] == "xla"
    assert "c16_256_128_req_s = " in done.stdout
    page = (tmp_path / "report" / "tiny-model.md").read_text()
    assert "| 16 requests at once, 256 in, 128 out: requests/s | " in page and "| - | - | - | - | - | " in page
    assert "- b1_1k was left out: needs 1281 tokens" in page and (tmp_path / "report" / "tiny-model.png").exists()


def test_a_wrong_flag_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench_serve.py"), "m", "--json", "r.json", "--workloads", "b2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "argument --workloads: got 'b2', allowed: all, or a list out of c16_256_128" in done.stderr
