"""Facts that the demo model is taught, as plain text beside this file: own tables of common knowledge."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def table(name: str) -> tuple[tuple[str, ...], ...]:
    """The rows of NAME.txt: one a line, fields between colons; blank lines and lines that begin with # are left out."""
    lines = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(line.split(":")) for line in lines if line and not line.startswith("#"))


@cache
def groups(name: str) -> dict[str, tuple[str, ...]]:
    """The rows of NAME.txt as a first field and the words of the second, which commas part."""
    return {key: tuple(word.strip() for word in words.split(",")) for key, words in table(name)}
