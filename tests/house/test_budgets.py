"""Size budgets: no room loses its shape by many small good reasons. Numbers and why: kernels are longer by nature."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from jaxserve import config
from tests.house import source

ROOMS = source.python_files("jaxserve", "checkpoints", "demo_model", "scripts")
KERNELS = source.python_files("pallas_kernels")
TESTS = source.python_files("tests")


@pytest.mark.parametrize(
    ("paths", "most_lines"), [(ROOMS, 400), (KERNELS, 600), (TESTS, 600)], ids=["rooms", "kernels", "tests"]
)
def test_files_are_short(paths: list[str], most_lines: int) -> None:
    lengths = {path: source.text(path).count("\n") for path in paths}
    assert paths
    assert {path: lines for path, lines in lengths.items() if lines > most_lines} == {}


@pytest.mark.parametrize(("paths", "most_lines"), [(ROOMS, 60), (KERNELS, 200)], ids=["rooms", "kernels"])
def test_functions_are_short(paths: list[str], most_lines: int) -> None:
    assert [piece.place for piece in source.functions(paths) if piece.lines > most_lines] == []


def test_nine_functions_of_ten_fit_on_a_screen() -> None:
    lengths = sorted(piece.lines for piece in source.functions(ROOMS))
    assert lengths[len(lengths) * 9 // 10] <= 35


def test_classes_are_short() -> None:
    assert [piece.place for piece in source.classes(ROOMS + KERNELS) if piece.lines > 250] == []


def self_attributes(node: ast.ClassDef) -> set[str]:
    """Names that the methods of a class assign on self."""
    stored = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    return {x.attr for x in stored if isinstance(x.value, ast.Name) and x.value.id == "self"}


def test_classes_hold_few_attributes() -> None:
    counts = {piece.place: len(self_attributes(piece.node)) for piece in source.classes(ROOMS + KERNELS)}
    assert {place: count for place, count in counts.items() if count > 15} == {}


def test_inheritance_is_one_level_deep() -> None:
    """Composition, no mixins; exceptions form a tree and may go deeper."""
    bases = {
        piece.name: {base.id for base in piece.node.bases if isinstance(base, ast.Name)}
        for piece in source.classes(ROOMS + KERNELS)
        if piece.path != "jaxserve/errors.py"
    }
    deep = [name for name, parents in bases.items() if any(bases.get(parent, set()) & set(bases) for parent in parents)]
    assert deep == []
    assert [name for name in bases if name.endswith("Mixin")] == []


def test_the_configuration_stays_small() -> None:
    leaves = [leaf for part in dataclasses.fields(config.Config) for leaf in leaf_fields(part.name)]
    assert len(leaves) <= 40


def leaf_fields(part: str) -> tuple[dataclasses.Field, ...]:
    """The fields of one part of the tree."""
    kinds = {"model": config.ModelConfig, "cache": config.CacheConfig, "schedule": config.ScheduleConfig}
    kinds |= {"runtime": config.RuntimeConfig, "server": config.ServerConfig}
    return dataclasses.fields(kinds[part])


def test_the_tree_is_small() -> None:
    total_bytes = sum((source.ROOT / path).stat().st_size for path in source.files())
    assert total_bytes < 40 << 20
