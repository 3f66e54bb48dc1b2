"""What the README says exists: its paths, its commands' flags, its names, and the two commands that it starts with."""

from __future__ import annotations

import argparse
import ast
import importlib
import re

import pytest

from jaxserve.cli import build_parser as jaxserve_parser
from scripts import _demo, bench_serve, bench_step, convert_checkpoint
from tests.house import source

README = source.text("README.md")
TOPS = (*source.PACKAGES, "proto", "scripts", "tests")


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """All long flags of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= flags(command)
    return {flag for flag in found if flag.startswith("--")}


def mentions(pattern: str) -> list[str]:
    """All matches in the README, each once, in order."""
    return list(dict.fromkeys(re.findall(pattern, README)))


def test_paths_exist() -> None:
    paths = mentions(rf"(?<![\w./-])((?:{'|'.join(TOPS)})(?:/[\w.-]+)*/?|pyproject\.toml|LICENSE|NOTICE)(?=[\s`,;:)])")
    paths = [path for path in paths if "/" in path or "." in path or path.isupper()]
    assert "jaxserve/cli.py" in paths and "scripts/requirements/cuda.txt" in paths
    assert [path for path in paths if not (source.ROOT / path.rstrip(".")).exists()] == []


def test_flags_exist() -> None:
    """On each line that calls one of our commands, its flags; elsewhere, a flag of any."""
    parsers = {
        "jaxserve serve": jaxserve_parser(),
        "jaxserve chat": jaxserve_parser(),
        "scripts/demo": _demo.build_parser(),
        "convert_checkpoint.py": convert_checkpoint.build_parser(),
        "bench_serve.py": bench_serve.build_parser(),
        "bench_step.py": bench_step.build_parser(),
    }
    known = {name: flags(parser) for name, parser in parsers.items()}
    everything = set().union(*known.values())
    checked = 0
    for line in README.splitlines():
        allowed = next((known[name] for name in known if name in line), everything)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
            assert flag in allowed, line
            checked += 1
    assert checked > 15


def test_commands_exist() -> None:
    (commands,) = (a.choices for a in jaxserve_parser()._actions if isinstance(a, argparse._SubParsersAction))
    mentioned = mentions(r"(?:bin/|`)jaxserve ([a-z]+)")
    assert mentioned and set(mentioned) <= set(commands)


def blocks() -> list[str]:
    """The Python examples."""
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(blocks())))
def test_examples_use_what_there_is(index: int) -> None:
    """They parse, their imports resolve, and each method they call on our classes exists with those keywords."""
    tree = ast.parse(blocks()[index])
    classes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            classes |= {alias.name: getattr(module, alias.name) for alias in node.names}
    names = {"llm": classes.get("LLM"), "client": classes.get("Client")}
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = [f for f in called if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
    for method in methods:
        assert isinstance(method.value, ast.Name)
        assert callable(getattr(names[method.value.id], method.attr))
    assert methods


def test_the_start_is_two_lines() -> None:
    start = README.split("## Start\n")[1].split("## ")[0]
    assert [line.strip() for line in start.splitlines() if line.startswith("    ")] == ["scripts/demo", "scripts/test"]
    for name in ("demo", "test"):
        assert (source.ROOT / "scripts" / name).stat().st_mode & 0o111, f"scripts/{name} is not executable"
