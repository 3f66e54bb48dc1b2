"""The benchmark on the CPU: what it prints and writes, and that a broken variant does not lose the others."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import jax
import pytest

from pallas_kernels import bench, timing
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import benchmark, xla

SMALL = "gqa_decode 4/2 e64 b2 kv128"


def broken(q: jax.Array, shared: tuple, own: tuple) -> jax.Array:
    raise RuntimeError("no such kernel")


def test_records_by_case_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One broken variant, one good one: exit status 1, the good one is recorded."""
    step = benchmark._step(xla.run, Device("cpu"))
    monkeypatch.setattr(benchmark, "variants", lambda problem, device, every: {"broken": broken, "xla": step})
    monkeypatch.setattr(timing, "_ROUND_S", 0.001)
    assert bench.main([SMALL, "--json", str(tmp_path / "out.json")]) == 1
    record = json.loads((tmp_path / "out.json").read_text())[SMALL]
    assert record["variant"] == "xla" and record["us"] > 0 and record["error"] < 5e-3 and record["bad"] == 0
    assert record["device"] == "cpu" and record["variants"] == {"xla": record["us"]}
    printed = capsys.readouterr().out
    assert "FAILED RuntimeError: no such kernel" in printed and "of limit" in printed


def test_rivals_are_named_as_the_cases_are() -> None:
    rivals = json.loads(bench.RIVALS.read_text())["rivals"]
    for op in ("gqa_decode", "gqa_prefill", "grouped_gemm", "mla_decode"):
        assert sum(case_id in rivals for case_id in bench.case_ids(op)) >= 3, op
    assert rivals["gqa_decode 32/2 b128 kv4k"]["us"] == 129.41


def test_who_times_is_alone(tmp_path: Path) -> None:
    """Two benches that compute share the file of --lock; one that times waits until both are done."""
    one, other = bench._Lock(tmp_path / "gpu.lock"), (tmp_path / "gpu.lock").open("a")
    with one.shared():
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_UN)
    with one.alone(), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other.close()
