"""The import contracts of pyproject.toml: kept, complete, and able to fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.house import source

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of the pyproject.toml in `folder` on the packages beside it."""
    return subprocess.run([sys.executable, "-c", LINT, "--no-cache"], cwd=folder, capture_output=True, text=True)


def test_contracts_are_kept() -> None:
    result = lint(source.ROOT)
    assert result.returncode == 0, result.stdout


def test_contracts_can_break(tmp_path: Path) -> None:
    """The same contracts on a copy in which the engine has learnt of JAX and of the server."""
    for package in source.PACKAGES:
        shutil.copytree(source.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source.ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "jaxserve" / "server" / "probe.py").write_text("import grpc\n")
    (tmp_path / "jaxserve" / "engine" / "probe.py").write_text("import jax\nimport jaxserve.server.probe\n")
    result = lint(tmp_path)
    assert result.returncode != 0
    assert "Imports flow down the rooms BROKEN" in result.stdout
    assert "The host rooms know no arrays of a device and no wire BROKEN" in result.stdout


def test_every_room_has_its_place() -> None:
    """A new module of jaxserve that no layer names would escape the contracts."""
    contracts = tomllib.loads(source.text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    rooms = {f"jaxserve.{path.split('/')[1].removesuffix('.py')}" for path in source.python_files("jaxserve")}
    assert rooms - {"jaxserve.__init__"} <= placed


def test_importing_jaxserve_is_quick_and_touches_no_device() -> None:
    code = (
        "import time; start = time.perf_counter(); import jaxserve; elapsed_s = time.perf_counter() - start\n"
        "import sys; jaxserve.SamplingParams; jaxserve.JaxserveError\n"
        "assert not {'jax', 'jaxlib', 'grpc', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
        "assert elapsed_s < 1, elapsed_s"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=source.ROOT, check=True)


def test_public_names_resolve() -> None:
    code = (
        "import jaxserve\n"
        "for name in jaxserve.__all__: assert getattr(jaxserve, name) is not None, name\n"
        "assert set(jaxserve.__all__) == set(dir(jaxserve)) and set(jaxserve._HOMES) < set(jaxserve.__all__)\n"
        "try: jaxserve.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError('an unknown name was found')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=source.ROOT, check=True)
