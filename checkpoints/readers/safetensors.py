"""Takes a Hugging Face directory with one or several .safetensors files; gives its tensors, read one at a time.

Our own strict reader: a file is refused unless its header describes its bytes exactly, with no overlap, hole or rest.
Data is read and not mapped, so that memory holds one tensor and not every page ever touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.readers.reader import SourceFile, TensorInfo, read_json
from jaxserve.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
BLOCK_BYTES = 4096  # of a tensor's fingerprint

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

# What a tokenizer may consist of; copied beside converted weights.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tiktoken.model",
)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies in its file."""

    path: Path
    offset_bytes: int
    info: TensorInfo


class SafetensorsReader:
    """A Hugging Face directory. Raises CheckpointError, with file and reason, for anything that is not as it says."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.config: dict[str, Any] = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if generation.is_file() else {}
        self._spans = open_directory(directory)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {name: span.info for name, span in self._spans.items()}

    def read(self, name: str) -> np.ndarray:
        """A tensor, in memory of its own."""
        span = self._spans[name]
        return (
            read_bytes(span.path, span.offset_bytes, span.info.num_bytes).view(span.info.dtype).reshape(span.info.shape)
        )

    def fingerprints(self) -> list[SourceFile]:
        """See SourceFile."""
        files: dict[Path, list[tuple[int, int]]] = {}
        for span in self._spans.values():
            files.setdefault(span.path, []).append((span.offset_bytes, span.info.num_bytes))
        return [fingerprint(path, spans) for path, spans in sorted(files.items())]

    def copy_files(self, target: Path) -> None:
        """Copy config, generation config and tokenizer files."""
        for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, target / name)


def open_directory(directory: Path) -> dict[str, Span]:
    """Every tensor of the directory by name, all headers checked."""
    if not (directory / INDEX_NAME).exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            raise CheckpointError(f"{directory}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        return read_header(single)
    weight_map = read_json(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX_NAME}: weight_map is missing or does not map names to files")
    shards = sorted(set(weight_map.values()))
    check_shards(directory, shards)
    spans: dict[str, Span] = {}
    for shard in shards:
        found = read_header(directory / shard)
        listed = {name for name, place in weight_map.items() if place == shard}
        if found.keys() != listed:
            odd = sorted(found.keys() ^ listed)
            raise CheckpointError(
                f"{directory / shard}: its tensors are not those that {INDEX_NAME} lists for it: {', '.join(odd[:5])}"
            )
        spans |= found
    return spans


def check_shards(directory: Path, shards: list[str]) -> None:
    """All files of the index are there, inside the directory. Raises CheckpointError naming those that are not."""
    for shard in shards:
        if not shard or Path(shard).name != shard:
            raise CheckpointError(f"{directory / INDEX_NAME}: {shard!r} is not the name of a file beside it")
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise CheckpointError(f"{directory}: missing {', '.join(missing)}, of {len(shards)} files that the index names")
    for shard in shards:
        if not (directory / shard).is_file():
            raise CheckpointError(f"{directory / shard}: is a directory, a safetensors file is expected")


def read_header(path: Path) -> dict[str, Span]:
    """The tensors of one file. Raises CheckpointError unless they fill the file exactly."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file")
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise CheckpointError(f"{path}: truncated: {file_bytes} bytes, the header's length alone takes 8")
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > HEADER_LIMIT_BYTES:
            raise CheckpointError(
                f"{path}: the header claims {header_bytes} bytes, allowed: at most {HEADER_LIMIT_BYTES}"
            )
        if header_bytes + 8 > file_bytes:
            raise CheckpointError(f"{path}: truncated: a header of {header_bytes} bytes in a file of {file_bytes}")
        header = parse_header(path, file.read(header_bytes))
    spans = {name: parse_entry(path, 8 + header_bytes, name, entry) for name, entry in header.items()}
    check_layout(path, spans, 8 + header_bytes, file_bytes)
    return spans


def parse_header(path: Path, text: bytes) -> dict[str, Any]:
    """The header's entries, without the free metadata."""
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name given twice would hide a tensor."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is given twice")
    return value


def parse_entry(path: Path, data_start_bytes: int, name: str, entry: Any) -> Span:
    """One tensor's entry; its span must be as long as shape and dtype say."""
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name}: its entry cannot be read: {entry!r:.200}") from error
    if not whole:
        raise CheckpointError(f"{path}: {name}: shape or offsets are not whole numbers: {entry!r:.200}")
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: {name}: {entry['dtype']}{list(shape)} takes {needed} bytes, its span holds {end - begin}"
        )
    return Span(path, data_start_bytes + begin, TensorInfo(shape, dtype))


def check_layout(path: Path, spans: Mapping[str, Span], data_start_bytes: int, file_bytes: int) -> None:
    """Spans follow each other without overlap or hole, from the header to the file's end."""
    at = data_start_bytes
    for name, span in sorted(spans.items(), key=lambda item: (item[1].offset_bytes, item[1].info.num_bytes)):
        if span.offset_bytes < at:
            raise CheckpointError(f"{path}: {name}: overlaps the tensor before it by {at - span.offset_bytes} bytes")
        if span.offset_bytes > at:
            raise CheckpointError(f"{path}: {name}: leaves a hole of {span.offset_bytes - at} bytes before it")
        at += span.info.num_bytes
    if at > file_bytes:
        raise CheckpointError(f"{path}: truncated: {file_bytes} bytes, its header describes {at}")
    if at < file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - at} bytes too long: {file_bytes}, its header describes {at}")


def read_bytes(path: Path, offset_bytes: int, num_bytes: int) -> np.ndarray:
    """A piece of a file, uint8. Raises CheckpointError where the file has become shorter."""
    try:
        data = np.fromfile(path, np.uint8, num_bytes, offset=offset_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if data.size != num_bytes:
        raise CheckpointError(f"{path}: ended after {data.size} of {num_bytes} bytes at {offset_bytes}")
    return data


def fingerprint(path: Path, spans: list[tuple[int, int]]) -> SourceFile:
    """Hash what stands before the first tensor, and a block at the start and in the middle of each."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(min((offset for offset, _ in spans), default=-1)))
        for offset, num_bytes in sorted(spans):
            for start in (offset, offset + num_bytes // 2):
                file.seek(start)
                digest.update(file.read(min(BLOCK_BYTES, offset + num_bytes - start)))
    return SourceFile(path.name, path.stat().st_size, digest.hexdigest())
