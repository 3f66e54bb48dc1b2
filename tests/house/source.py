"""The repository as the house tests see it: which files there are, their text and their syntax trees."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints", "demo_model")
GENERATED = "jaxserve/v1/"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def files() -> tuple[str, ...]:
    """Paths, relative to the root, of all files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(sorted({path for path in listed.split("\0") if path and (ROOT / path).is_file()}))


def python_files(*folders: str) -> list[str]:
    """Hand-written Python files below the folders."""
    starts = tuple(f"{folder}/" for folder in folders)
    return [path for path in files() if path.endswith(".py") and path.startswith(starts) and GENERATED not in path]


@functools.cache
def text(path: str) -> str:
    """A file's text; bytes that are no UTF-8 are replaced."""
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


@functools.cache
def tree(path: str) -> ast.Module:
    """A Python file's syntax tree."""
    return ast.parse(text(path), path)


@dataclass(frozen=True, slots=True)
class Piece:
    """A function or a class, with where it stands."""

    path: str
    name: str
    node: FunctionNode | ast.ClassDef
    lines: int

    @property
    def place(self) -> str:
        """What a failing test prints."""
        return f"{self.path}:{self.node.lineno} {self.name} ({self.lines} lines)"


def pieces(paths: list[str], *kinds: type[ast.AST]) -> Iterator[Piece]:
    """All functions or classes of the files; decorators do not count as lines."""
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, kinds):
                assert isinstance(node, FunctionNode | ast.ClassDef)
                yield Piece(path, node.name, node, (node.end_lineno or node.lineno) - node.lineno + 1)


def functions(paths: list[str]) -> list[Piece]:
    """All functions and methods, nested ones too."""
    return list(pieces(paths, ast.FunctionDef, ast.AsyncFunctionDef))


def classes(paths: list[str]) -> list[Piece]:
    """All classes."""
    return list(pieces(paths, ast.ClassDef))
