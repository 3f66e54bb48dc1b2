"""The pins: every package by name and version, the same in pyproject.toml, and complete, so that pip picks nothing."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house import source

FOLDER = source.ROOT / "scripts" / "requirements"
FILES = sorted(path.name for path in FOLDER.glob("*.txt"))


def canonical(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, str]:
    """Package -> version of a requirement file and those it includes."""
    found: dict[str, str] = {}
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.split()[1])
        elif "==" in line and not line.startswith("#"):
            package, version = line.split("==")
            found[canonical(package)] = version
    return found


@pytest.mark.parametrize("name", FILES)
def test_lines_are_pins(name: str) -> None:
    for line in (FOLDER / name).read_text().splitlines():
        assert re.fullmatch(r"#.*|-r \w+\.txt|[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), line


def test_project_metadata_has_the_same_pins() -> None:
    project = tomllib.loads(source.text("pyproject.toml"))["project"]
    runtime = pins("runtime.txt")
    for requirement in map(Requirement, project["dependencies"]):
        assert str(requirement.specifier) == f"=={runtime[canonical(requirement.name)]}"
    (cuda,) = map(Requirement, project["optional-dependencies"]["cuda"])
    assert str(cuda.specifier) == f"=={runtime['jax']}" and cuda.extras == {"cuda13"}
    assert pins("cuda.txt")["jax-cuda13-plugin"] == runtime["jax"]
    for extra in ("bench", "train"):
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            assert str(requirement.specifier) == f"=={pins('bench.txt')[requirement.name]}"


@pytest.mark.parametrize("name", ["runtime.txt", "bench.txt", "test.txt"])
def test_nothing_is_left_for_pip_to_choose(name: str) -> None:
    pinned = pins(name)
    for package in pinned:
        for requirement in map(Requirement, importlib.metadata.requires(package) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonical(requirement.name) in pinned, f"{package} needs {requirement.name}"


def test_tests_run_with_the_pins() -> None:
    """What is tested is what the files say, unless somebody ran pip in the environment."""
    assert {name: importlib.metadata.version(name) for name in pins("test.txt")} == pins("test.txt")


def test_version_is_said_once() -> None:
    project = tomllib.loads(source.text("pyproject.toml"))["project"]
    assert f'__version__ = "{project["version"]}"' in source.text("jaxserve/__init__.py")


def test_license_is_whole() -> None:
    text = (Path(source.ROOT) / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
