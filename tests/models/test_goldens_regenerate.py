"""The tiny goldens come out of the script as they are committed; only where torch and transformers 5.24 are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import make_goldens

ENVIRONMENTS = (make_goldens.ROOT / ".cache" / "torch", Path(sys.prefix))


def fit_environment() -> Path:
    """One that can make them; skips the test, saying why not, if there is none."""
    reasons = []
    for folder in ENVIRONMENTS:
        why = make_goldens.unfit(folder) if (folder / "bin" / "python").is_file() else "which is not there"
        if not why:
            return folder
        reasons.append(f"{folder}, {why}")
    pytest.skip(f"needs {' and '.join(make_goldens.PACKAGES[:2])}, looked in {'; '.join(reasons)}")


def test_tiny_goldens_come_out_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Without the demo model's, which take minutes, and the Llamas': torch draws their weights, by processor."""
    environment = fit_environment()
    families = [family for family in make_goldens.FAMILIES if family not in ("smollm2", "llama")]
    code = make_goldens.main(["--check", "--environment", str(environment), "--family", *families])
    assert code == 0, capfd.readouterr().out
    assert "all as committed" in capfd.readouterr().out
