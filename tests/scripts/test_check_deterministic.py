"""The check of the deterministic mode as a script: it passes in the mode, and fails without."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_deterministic

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v2_tiny" / "lite"
SMALL = ["--requests=12", "--rounds=2", "--alone=3", "--tokens=12", "--max-num-seqs=6", "--max-num-batched-tokens=64"]
ENGINE = ["--device=cpu", "--dtype=bfloat16", "--load-format=auto", "--compile-cache-dir=", "--num-pages=90"]


@pytest.mark.parametrize(("mode", "code", "verdict"), [(["--deterministic"], 0, "all equal"), ([], 1, "FAILED")])
def test_it_tells_the_mode_from_its_absence(
    mode: list[str], code: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_deterministic.main([str(GOLDEN), *SMALL, *ENGINE, *mode]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "round 2",
        "among strangers",
        "the other way round",
        "one by one",
    ]
    assert lines[-1].endswith(verdict)
