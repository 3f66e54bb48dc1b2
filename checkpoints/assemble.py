"""Takes a reader and a name table; gives parameters as host arrays, one at a time, after checking that all fits."""

from __future__ import annotations

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.names.table import NameTable, Part, Piece, Target
from checkpoints.readers.reader import Reader, TensorInfo
from jaxserve.errors import CheckpointError

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64))
NAMES_SHOWN = 8
COMPARED_ROWS = 4096


def check_names(reader: Reader, table: NameTable) -> None:
    """Every parameter has its source tensors, of the right shape; every source tensor is used.

    Raises CheckpointError naming those that are missing, unknown or misshapen, or a head that should equal the
    embedding and does not.
    """
    tensors = reader.tensors
    parts = {part.source: part for target in table.targets.values() for part in target.parts}
    missing = sorted(parts.keys() - tensors.keys())
    unused = sorted(tensors.keys() - parts.keys() - table.duplicates.keys())
    unused = [name for name in unused if not any(re.fullmatch(pattern, name) for pattern in table.ignored)]
    wrong = [
        f"{name} {tensors[name]}, expected {list(part.source_shape)}"
        for name, part in sorted(parts.items())
        if name in tensors and tensors[name].shape != part.source_shape
    ]
    odd = [f"{name} {tensors[name]}" for name in sorted(parts) if name in tensors and not is_float(tensors[name])]
    faults = {
        "missing": missing,
        "unknown": unused,
        "misshapen": wrong,
        "not float32, float16 or bfloat16": odd,
    }
    if any(faults.values()):
        raise CheckpointError(f"{reader.path}: tensors do not fit the model: {list_faults(faults)}")
    for name, other in table.duplicates.items():
        if name in tensors and not equal_tensors(reader, name, other):
            raise CheckpointError(f"{reader.path}: {name} differs from {other}, though the config ties them")


def is_float(info: TensorInfo) -> bool:
    """Whether a plain cast makes it the parameter."""
    return info.dtype in FLOATS


def list_faults(faults: Mapping[str, list[str]]) -> str:
    """All kinds that occur, each with its first names and how many more."""
    texts = []
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            texts.append(f"{kind}: {', '.join(names[:NAMES_SHOWN])}{more}")
    return "; ".join(texts)


def equal_tensors(reader: Reader, name: str, other: str) -> bool:
    """Bit for bit, in a common dtype."""
    if reader.tensors[name].shape != reader.tensors[other].shape:
        return False
    one, two = reader.read(name), reader.read(other)
    return all(
        np.array_equal(one[row : row + COMPARED_ROWS], two[row : row + COMPARED_ROWS])
        for row in range(0, len(one), COMPARED_ROWS)
    )


def assemble_piece(reader: Reader, piece: Piece, dtype: np.dtype) -> np.ndarray:
    """Put one piece together. Peak memory: the piece and its largest part."""
    if len(piece.parts) == 1:
        return read_part(reader, piece.parts[0]).astype(dtype, copy=False)
    whole = np.empty(piece.shape, dtype)
    at = 0
    for part in piece.parts:
        index = (*[slice(None)] * piece.axis, slice(at, at + part.shape[piece.axis]))
        whole[index] = read_part(reader, part)
        at += part.shape[piece.axis]
    return whole


def read_part(reader: Reader, part: Part) -> np.ndarray:
    """A source tensor in the shape that the piece takes it in."""
    return reader.read(part.source).reshape(part.shape)


def assemble(reader: Reader, target: Target, dtype: np.dtype) -> np.ndarray:
    """A whole parameter."""
    if not target.stacked:
        return assemble_piece(reader, target.pieces[0], dtype)
    whole = np.empty(target.shape, dtype)
    for index, piece in enumerate(target.pieces):
        whole[index] = assemble_piece(reader, piece, dtype)
    return whole


def take_apart(target: Target, array: np.ndarray) -> dict[str, np.ndarray]:
    """The way back: a parameter -> its source tensors by name."""
    arrays = list(array) if target.stacked else [array]
    found: dict[str, np.ndarray] = {}
    for piece, whole in zip(target.pieces, arrays, strict=True):
        ends = np.cumsum([part.shape[piece.axis] for part in piece.parts])[:-1]
        for part, values in zip(piece.parts, np.split(whole, ends, piece.axis), strict=True):
            found[part.source] = np.ascontiguousarray(values).reshape(part.source_shape)
    return found
