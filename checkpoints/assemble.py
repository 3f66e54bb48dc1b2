"""Takes a reader and a name table; gives parameters as host arrays, one at a time, after checking that all fits."""

from __future__ import annotations

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.names.table import NameTable, Part, Piece, Target, covers
from checkpoints.readers.reader import Reader, TensorInfo
from jaxserve.errors import CheckpointError

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64))
NAMES_SHOWN = 8
COMPARED_ROWS = 4096


def check_names(reader: Reader, table: NameTable) -> None:
    """Every parameter has its source tensors, of the right shape; every source tensor is used.

    Raises CheckpointError naming those that are missing, unknown or misshapen, or a tensor that should equal another
    and does not.
    """
    check_fit(reader, table)
    check_duplicates(reader, table)


def check_fit(reader: Reader, table: NameTable) -> None:
    """Names, shapes and dtypes, from the headers alone."""
    tensors, sources = reader.tensors, table.sources()
    assert all(map(covers, sources.values())), "a name table takes each element of a source tensor once"
    shapes = {name: parts[0].source_shape for name, parts in sources.items()}
    ignored = re.compile("|".join(table.ignored) or r"\Z.")
    unused = sorted(tensors.keys() - shapes.keys() - table.duplicates.keys())
    faults = {
        "missing": sorted(shapes.keys() - tensors.keys()),
        "unknown": [name for name in unused if not ignored.fullmatch(name)],
        "misshapen": [
            f"{name} {tensors[name]}, expected {list(shape)}"
            for name, shape in sorted(shapes.items())
            if name in tensors and tensors[name].shape != shape
        ],
        "not float32, float16 or bfloat16": [
            f"{name} {tensors[name]}" for name in sorted(shapes) if name in tensors and not is_float(tensors[name])
        ],
    }
    if any(faults.values()):
        raise CheckpointError(f"{reader.path}: tensors do not fit the model: {list_faults(faults)}")


def check_duplicates(reader: Reader, table: NameTable) -> None:
    """Tensors that may be in the files a second time are the same there."""
    for name, other in table.duplicates.items():
        if name in reader.tensors and not equal_tensors(reader, name, other):
            raise CheckpointError(f"{reader.path}: {name} differs from {other}, though the model has one for both")


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
    """Put one piece together. Peak memory: the piece and its largest part.

    Raises CheckpointError where a value is NaN or infinite, or becomes so in `dtype`.
    """
    if len(piece.parts) == 1:
        return checked(reader, piece.parts[0], dtype)
    whole = np.empty(piece.shape, dtype)
    at = 0
    for part in piece.parts:
        index = (*[slice(None)] * piece.axis, slice(at, at + part.shape[piece.axis]))
        whole[index] = checked(reader, part, dtype)
        at += part.shape[piece.axis]
    return whole


def checked(reader: Reader, part: Part, dtype: np.dtype) -> np.ndarray:
    """A part in the parameter's dtype. One bad value of a router or a norm spoils every answer, and says nothing."""
    values = read_part(reader, part).astype(dtype, copy=False)
    if not all_finite(values):
        raise CheckpointError(
            f"{reader.path}: {part.source}: got NaN or infinity (as {dtype.name}), allowed: finite numbers"
        )
    return values


def all_finite(values: np.ndarray) -> bool:
    """Of bfloat16 by the bits, twice as fast as its own test."""
    if values.dtype == np.dtype(ml_dtypes.bfloat16):
        return bool((np.bitwise_and(values.view(np.uint16), 0x7FFF) < 0x7F80).all())
    return bool(np.isfinite(values).all())


def read_part(reader: Reader, part: Part) -> np.ndarray:
    """A source tensor, or a cut of it, in the shape that the piece takes it in."""
    values = reader.read(part.source)
    if part.cut is None:
        return values.reshape(part.shape)
    return np.ascontiguousarray(values.reshape(part.cut.view)[part.cut.index]).reshape(part.shape)


def assemble(reader: Reader, target: Target, dtype: np.dtype) -> np.ndarray:
    """A whole parameter."""
    if not target.stacked:
        return assemble_piece(reader, target.pieces[0], dtype)
    whole = np.empty(target.shape, dtype)
    for index, piece in enumerate(target.pieces):
        whole[index] = assemble_piece(reader, piece, dtype)
    return whole


def take_apart(table: NameTable, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The way back: parameters -> their source tensors by name."""
    found: dict[str, np.ndarray] = {}
    for name, target in table.targets.items():
        for piece, whole in zip(target.pieces, arrays[name] if target.stacked else [arrays[name]], strict=True):
            ends = np.cumsum([part.shape[piece.axis] for part in piece.parts])[:-1]
            for part, values in zip(piece.parts, np.split(whole, ends, piece.axis), strict=True):
                source = found.setdefault(part.source, np.empty(part.source_shape, whole.dtype))
                place = source.reshape(part.cut.view)[part.cut.index] if part.cut else source
                place[...] = values.reshape(place.shape)
    return found
