"""What a name table consists of: for each parameter of the decoder, the source tensors it is put together from.

Only cut, reshape and join: weights keep Hugging Face's [out, in] orientation, and each element of a source tensor
stands in exactly one place, so a table can also be read backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

type Shape = tuple[int, ...]

MTP = "mtp."  # how the decoder's multi-token prediction parameters begin; serving may leave out all of them


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of a source tensor: seen as `view` (the same elements in the same order), `start` to `stop` of `axis`."""

    view: Shape
    axis: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        """What takes it from the view."""
        return (*[slice(None)] * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor of `source_shape`, or a cut of it, taken in `shape` (the same elements in the same order)."""

    source: str
    source_shape: Shape
    shape: Shape
    cut: Cut | None = None


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
    mtp_sources: str = ""  # regular expression of all source names of MTP layers; empty: the model has none

    def without_mtp(self) -> NameTable:
        """The decoder alone: whatever the files hold of the MTP layers is ignored."""
        if not self.mtp_sources:
            return self
        targets = {name: target for name, target in self.targets.items() if not name.startswith(MTP)}
        duplicates = {a: b for a, b in self.duplicates.items() if not re.fullmatch(self.mtp_sources, a)}
        return NameTable(targets, (*self.ignored, self.mtp_sources), duplicates)

    def sources(self) -> dict[str, list[Part]]:
        """Source tensor -> its parts, which cover it without overlap: see `covers`."""
        found: dict[str, list[Part]] = {}
        for target in self.targets.values():
            for part in target.parts:
                found.setdefault(part.source, []).append(part)
        return found


def covers(parts: list[Part]) -> bool:
    """Whether the parts of one source tensor take each of its elements exactly once."""
    if len(parts) == 1 and parts[0].cut is None:
        return True
    cuts = sorted((part.cut for part in parts if part.cut), key=lambda cut: cut.start)
    if (
        len(cuts) < len(parts)
        or len({(part.source_shape, part.cut.view, part.cut.axis) for part in parts if part.cut}) > 1
    ):
        return False
    starts, stops = [cut.start for cut in cuts], [cut.stop for cut in cuts]
    return [*starts, cuts[0].view[cuts[0].axis]] == [0, *stops]


def plain(source: str, shape: Shape, as_shape: Shape | None = None) -> Target:
    """A parameter that is one source tensor, perhaps in another shape."""
    return Target((Piece((Part(source, shape, as_shape or shape),)),))


def joined(axis: int, *parts: Part) -> Target:
    """A parameter that several source tensors make, side by side along `axis`."""
    return Target((Piece(parts, axis),))
