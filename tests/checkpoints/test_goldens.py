"""Tiny Llamas as transformers saved them, against transformers' logits: files, names and rows in one comparison.

The plain model here knows unscaled RoPE only; tests/models compares the decoder on all of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints.assemble import assemble, check_names
from checkpoints.names.families import name_table
from checkpoints.readers.safetensors import SafetensorsReader
from jaxserve.models.families import model_spec
from tests.fakes.tiny import reference_logits

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "llama_tiny"


def test_b131_logits_at_all_positions() -> None:
    """Position 0 alone proves nothing: its rotation is by no angle."""
    reader = SafetensorsReader(GOLDENS / "gqa")
    spec = model_spec(reader.config)
    table = name_table("llama", spec)
    weights = {name: assemble(reader, target, np.dtype(np.float64)) for name, target in table.targets.items()}
    with np.load(GOLDENS / "gqa" / "reference.npz") as reference:
        for index in (0, 1):
            found = reference_logits(spec, weights, reference[f"ids_{index}"])
            right = reference[f"logits_{index}"]
            worst = np.abs(found - right).max(-1) / np.abs(right).max(-1)
            assert len(worst) == len(reference[f"ids_{index}"])
            assert worst.max() < 1e-4


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir() if path.is_dir()))
def test_files_of_transformers_fit(name: str) -> None:
    reader = SafetensorsReader(GOLDENS / name)
    check_names(reader, name_table("llama", model_spec(reader.config)))
