"""The benchmark on the CPU: what it prints and writes, and that a broken variant does not lose the others."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["softmax"], "there is no op 'softmax', must be one of dense_gemm, gqa_decode, "),
        ([""], "there is no op '', must be one of "),
        (["mla_decode h7"], "there is no case 'mla_decode h7', must be 'mla_decode' for all, or like 'mla_decode h"),
        ([SMALL, "--loops", "0"], "--loops is 0, must be 1 or more."),
        ([SMALL, "--seconds", "nan"], "--seconds is nan, must be above 0."),
        (
            [SMALL, "--json", "/nowhere/out.json"],
            "--json is /nowhere/out.json, must be a file in a folder that exists.",
        ),
        ([SMALL, "--json", "/"], "--json is /, must be a file in a folder that exists."),
        ([SMALL, "--lock", "/nowhere/gpu"], "--lock is /nowhere/gpu, must be a file in a folder that exists."),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out and sentence in printed.err


def test_a_check_of_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A label that no case has must not look like a check that passed."""
    monkeypatch.setattr(bench, "_case", lambda *_: ({}, 0))
    nothing = SimpleNamespace(checks=lambda device: [("even", lambda: pytest.fail("it was not asked for"))])
    monkeypatch.setattr(bench, "part", lambda op, module: nothing)
    monkeypatch.setattr(bench, "case_ids", lambda op: ())
    assert bench.main(["kv_write", "--check", "evne"]) == 1
    assert "no case of kv_write has a label that holds this" in capsys.readouterr().out


@pytest.mark.parametrize("op", bench.OPS)
def test_every_case_has_the_form_of_its_op(op: str) -> None:
    """So that it can be asked for alone."""
    assert bench._wanted(list(bench.case_ids(op))) == ([op], list(bench.case_ids(op)))


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
