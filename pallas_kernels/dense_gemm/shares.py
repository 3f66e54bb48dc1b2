"""How one product is shared out: takes its tiles of columns and the steps of each, gives every CTA an equal range.

All steps of all tiles stand in a row, CTAs take equal ranges of them (stream-K, arXiv 2301.03598): a CTA has parts
of a few neighbouring tiles, and a tile few parts whatever its length is. It works for integers and traced ones alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shares:
    """`tiles` tiles of `steps` steps for so many CTAs."""

    tiles: int
    steps: int
    ctas: int

    @property
    def total(self) -> int:
        """Steps of all tiles."""
        return self.tiles * self.steps

    @property
    def most_parts(self) -> int:
        """Of a tile."""
        return max(self.parts(tile) for tile in range(self.tiles))

    def parts(self, tile: Any) -> Any:
        """How many CTAs have some of a tile."""
        return self.owner((tile + 1) * self.steps - 1) - self.owner(tile * self.steps) + 1

    def begin(self, cta: Any) -> Any:
        """First step of a CTA's range; of `ctas` the end of the last one."""
        return cta * self.total // self.ctas

    def owner(self, step: Any) -> Any:
        """The CTA whose range holds a step."""
        return ((step + 1) * self.ctas - 1) // self.total
