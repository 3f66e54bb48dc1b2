"""What both readers present to the rest of the package: a config, and tensors under Hugging Face names, one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor as `read` returns it."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that weights come from, and a fingerprint: a hash of its header and of two blocks of each tensor.

    Hashing whole files would make "is this the same source?" as slow as the conversion. A fine-tune of the same model
    has the same header and other blocks.
    """

    name: str
    num_bytes: int
    fingerprint: str


class Reader(Protocol):
    """A source of weights. Opening one checks all headers; no tensor is read before `read`."""

    path: Path
    config: dict[str, Any]  # as in config.json
    generation_config: dict[str, Any]  # as in generation_config.json; may be empty

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor of its own memory, so that what was read can be given back at once."""
        ...

    def fingerprints(self) -> list[SourceFile]:
        """All weight files, to tell sources apart."""
        ...

    def copy_files(self, target: Path) -> None:
        """Write config, generation config and tokenizer files into the directory `target`."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError where it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def write_json(path: Path, value: object) -> None:
    """Readable JSON with a last newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
