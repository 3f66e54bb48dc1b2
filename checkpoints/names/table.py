"""What a name table consists of: for each parameter of the decoder, the source tensors it is put together from.

Only reshape and join: weights keep Hugging Face's [out, in] orientation, so a table can also be read backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

type Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor of `source_shape`, taken in `shape` (the same elements in the same order)."""

    source: str
    source_shape: Shape
    shape: Shape


@dataclass(frozen=True, slots=True)
class Piece:
    """Parts joined along `axis`."""

    parts: tuple[Part, ...]
    axis: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the whole."""
        first = self.parts[0].shape
        joined = sum(part.shape[self.axis] for part in self.parts)
        return (*first[: self.axis], joined, *first[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter: one piece, or with `stacked` numbered pieces of one shape along a new first axis.

    The stacked ones (experts) may be larger than memory: they are written piece by piece, each a chunk of one array.
    """

    pieces: tuple[Piece, ...]
    stacked: bool = False

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return (len(self.pieces), *self.pieces[0].shape) if self.stacked else self.pieces[0].shape

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of all pieces."""
        return tuple(part for piece in self.pieces for part in piece.parts)


@dataclass(frozen=True, slots=True)
class NameTable:
    """A family's parameters for one model, and what else may stand in its files."""

    targets: Mapping[str, Target]
    ignored: tuple[str, ...] = ()  # regular expressions of source names that carry nothing
    duplicates: Mapping[str, str] = field(default_factory=dict)  # source that may be there if it equals the other one


def plain(source: str, shape: Shape, as_shape: Shape | None = None) -> Target:
    """A parameter that is one source tensor, perhaps in another shape."""
    return Target((Piece((Part(source, shape, as_shape or shape),)),))


def joined(axis: int, *parts: Part) -> Target:
    """A parameter that several source tensors make, side by side along `axis`."""
    return Target((Piece(parts, axis),))
