"""What a converted checkpoint says of itself: which source, which dtype, and a checksum of each parameter.

The same facts, in a journal that grows by a line a batch, let a killed conversion go on where it was.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.files import PROVENANCE_NAME
from checkpoints.readers.reader import Reader, SourceFile, TensorInfo, read_json, write_json
from jaxserve.errors import CheckpointError

FORMAT = 1
JOURNAL_NAME = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which conversion this is: two with equal identities give equal checkpoints."""

    source: str  # the source's own name; not compared
    files: tuple[SourceFile, ...]
    dtype: str  # of all parameters but those that the decoder keeps in float32
    without_mtp: bool = False
    format: int = FORMAT

    def why_not(self, other: Identity) -> str | None:
        """None where both are the same conversion; else what differs, in words."""
        if self.format != other.format:
            return f"it has format {other.format}, this version writes {self.format}"
        if self.files != other.files:
            return f"it was made from another source ({other.source})"
        if self.dtype != other.dtype:
            return f"it holds {other.dtype}, asked for: {self.dtype}"
        if self.without_mtp != other.without_mtp:
            return f"it was made {'without' if other.without_mtp else 'with'} MTP layers"
        return None


@dataclass(slots=True)
class Provenance:
    """An identity, and what is done: parameter name -> checksum; of stacked ones a checksum for each piece."""

    identity: Identity
    checksums: dict[str, list[int]] = field(default_factory=dict)


def identify(reader: Reader, dtype: str, without_mtp: bool) -> Identity:
    """The identity of converting this source like this."""
    return Identity(reader.path.resolve().name, tuple(reader.fingerprints()), dtype, without_mtp)


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def identity_from(path: Path, value: Mapping[str, Any]) -> Identity:
    """The way back from JSON. Raises CheckpointError for a damaged file."""
    try:
        files = tuple(SourceFile(**entry) for entry in value["files"])
        return Identity(value["source"], files, value["dtype"], value.get("without_mtp", False), value["format"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not the record of a conversion: {error!r}") from error


def write_provenance(directory: Path, provenance: Provenance, tensors: Mapping[str, TensorInfo]) -> None:
    """Write the finished record."""
    entries = {
        name: {"dtype": str(info.dtype), "shape": list(info.shape), "crc32": provenance.checksums[name]}
        for name, info in tensors.items()
    }
    write_json(directory / PROVENANCE_NAME, asdict(provenance.identity) | {"tensors": entries})


def read_provenance(directory: Path) -> Provenance:
    """The record of a finished conversion. Raises CheckpointError for a damaged one."""
    path = directory / PROVENANCE_NAME
    value = read_json(path)
    identity = identity_from(path, value)
    try:
        return Provenance(identity, {name: list(entry["crc32"]) for name, entry in value["tensors"].items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not the record of a conversion: {error!r}") from error


class Journal:
    """An unfinished conversion's record on disk. A line cut off by a kill is dropped when it is opened again."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self._path = directory / JOURNAL_NAME
        self.provenance = Provenance(identity)
        if self._path.is_file():
            self._resume()
        else:
            self._append(asdict(identity))

    def _resume(self) -> None:
        lines = whole_lines(self._path)
        if not lines:
            self._path.unlink()
            self._append(asdict(self.provenance.identity))
            return
        reason = self.provenance.identity.why_not(identity_from(self._path, lines[0]))
        if reason:
            raise CheckpointError(
                f"{self._path.parent}: an unfinished conversion is in the way: {reason}; remove it to start anew"
            )
        for line in lines[1:]:
            for name, checksums in line.items():
                self.provenance.checksums.setdefault(name, []).extend(checksums)
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def add(self, checksums: Mapping[str, list[int]]) -> None:
        """These parameters, or next pieces of stacked ones, are in the checkpoint."""
        for name, values in checksums.items():
            self.provenance.checksums.setdefault(name, []).extend(values)
        self._append(checksums)

    def pieces_done(self, name: str) -> int:
        """How many pieces of a parameter are in the checkpoint; one that is not stacked has one."""
        return len(self.provenance.checksums.get(name, ()))

    def _append(self, value: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The record is complete elsewhere."""
        self._path.unlink()


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """All lines that end; the last one of a killed process may not."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1] if line]
