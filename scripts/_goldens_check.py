"""Compares freshly made goldens with the committed ones: the same ids and weights, logits up to rounding.

Runs where torch is, and so imports nothing of this repository; a test runs it without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# Of the largest number of an array. Another way to add up float32 sums, as on another processor, moves these logits by
# up to 5e-6; what a test of parity allows is 2e-4.
LIMIT = 1e-5
VERSIONS = ("transformers_version", "made_with")  # said in the files, and no part of what is compared


def compare(made: Path, committed: Path) -> list[str]:
    """One sentence for each file that differs; every made file must be there, committed ones may be more."""
    found = []
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        name = path.relative_to(made)
        if not (committed / name).is_file():
            found.append(f"{name} is not among the committed files")
        elif why := difference(path, committed / name):
            found.append(f"{name}: {why}")
    return found


def difference(made: Path, committed: Path) -> str:
    """How two files differ; empty if they do not."""
    if made.suffix == ".json":
        return nested("", *(json.loads(path.read_text(encoding="utf-8")) for path in (made, committed)))
    if made.suffix == ".npz":
        left, right = (dict(np.load(path)) for path in (made, committed))
    else:
        left, right = (raw_tensors(path) for path in (made, committed))
    if left.keys() != right.keys():
        return f"names that only one of them has: {sorted(left.keys() ^ right.keys())}"
    return next((why for name in left if (why := array_difference(name, left[name], right[name]))), "")


def raw_tensors(path: Path) -> dict[str, np.ndarray]:
    """The bytes of each tensor of a safetensors file; its name here says type and shape, too. numpy has no bfloat16."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        f"{name} {entry['dtype']}{entry['shape']}": np.frombuffer(
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], np.uint8
        )
        for name, entry in header.items()
    }


def array_difference(name: str, made: np.ndarray, committed: np.ndarray) -> str:
    """How two arrays differ; empty if they do not. Weights and ids must be equal."""
    if made.shape != committed.shape or made.dtype != committed.dtype:
        return f"{name} is {made.dtype} {list(made.shape)}, and was {committed.dtype} {list(committed.shape)}"
    if made.dtype.kind != "f":
        return "" if np.array_equal(made, committed) else f"{name} has other values"
    error = float(np.abs(made - committed).max() / np.abs(committed).max())
    return "" if error <= LIMIT else f"{name} differs by {error:.1e} of its largest number, and may by {LIMIT:.0e}"


def nested(place: str, made: Any, committed: Any) -> str:
    """How two JSON documents differ; empty if they do not."""
    if isinstance(made, dict) and isinstance(committed, dict):
        keys = [key for key in {**made, **committed} if key not in VERSIONS]
        absent = object()
        pairs = [(f"{place}/{key}", made.get(key, absent), committed.get(key, absent)) for key in keys]
    elif isinstance(made, list) and isinstance(committed, list) and len(made) == len(committed):
        pairs = [(f"{place}/{index}", *pair) for index, pair in enumerate(zip(made, committed, strict=True))]
    elif isinstance(made, float) and isinstance(committed, float):
        # A margin of two logits is a small difference of large numbers.
        near = abs(made - committed) <= LIMIT * max(1.0, abs(committed))
        return "" if near else f"{place} is {made!r}, and was {committed!r}"
    else:
        return "" if made == committed else f"{place} is {made!r}, and was {committed!r}"
    return next((why for pair in pairs if (why := nested(*pair))), "")
