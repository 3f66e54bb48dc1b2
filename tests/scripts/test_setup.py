"""How scripts/test and scripts/demo find a Python and make .venv; nothing is installed and no network is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import _setup

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOO_OLD = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.2'\nexit 1\n"


def executable(path: Path, text: str) -> Path:
    """A script at `path`, whose folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find_python(root: Path, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What _setup.sh finds with nothing on the PATH but `path`."""
    command = f'root="{root}"; . "{SCRIPTS}/_setup.sh"; require_python; echo "$python"'
    settings = {"PATH": str(path), "HOME": str(root / "nobody"), **environment}
    return subprocess.run(["/bin/sh", "-eu", "-c", command], env=settings, capture_output=True, text=True)


def shell_tools(folder: Path) -> None:
    """The one tool that _setup.sh needs."""
    os.symlink("/bin/cat", folder / "cat")


@pytest.fixture
def no_system_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some machines have a Python where _setup.sh looks beside the PATH."""
    if any(
        Path(f"/{place}/bin/python3.{minor}").exists()
        for place in ("usr/local", "opt/homebrew")
        for minor in (12, 13, 14)
    ):
        pytest.skip("this machine has a Python in /usr/local/bin or /opt/homebrew/bin")


@pytest.mark.usefixtures("no_system_python")
def test_no_python_is_one_clear_text(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "python3", TOO_OLD)
    shell_tools(tmp_path / "bin")
    result = find_python(tmp_path, tmp_path / "bin")
    assert result.returncode == 1 and result.stdout == ""
    assert "No Python 3.12 or newer was found" in result.stderr
    assert "Here python3 is: Python 3.9.2" in result.stderr
    assert "apt-get install" in result.stderr and "pyenv install 3.12" in result.stderr


@pytest.mark.usefixtures("no_system_python")
def test_a_pyenv_build_counts_also_in_a_path_with_spaces(tmp_path: Path) -> None:
    root = tmp_path / "my own folder"
    real = executable(
        root / "py env" / "versions" / "3.12.9" / "bin" / "python3.12", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    )
    executable(root / "bin" / "python3.12", TOO_OLD)  # a shim whose version is not chosen
    assert find_python(root, root / "bin", PYENV_ROOT=str(root / "py env")).stdout.strip() == str(real)


def test_the_environment_that_is_there_comes_first_and_a_named_python_before_it(tmp_path: Path) -> None:
    there = executable(tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    assert find_python(tmp_path, tmp_path).stdout.strip() == str(there)
    assert find_python(tmp_path, tmp_path, PYTHON=sys.executable).stdout.strip() == sys.executable


class World:
    """A repository in a temporary folder, and a record of what _setup would have done to it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.done = root, []
        self.works = False
        self.have: dict[str, str] = {}
        self.requirements = root / "scripts" / "requirements"
        self.requirements.mkdir(parents=True)
        (self.requirements / "runtime.txt").write_text("# comment\nnumpy==1.0\n")
        (self.requirements / "test.txt").write_text("-r runtime.txt\npytest==2.0\n")
        (root / "pyproject.toml").write_text("")
        venv = root / ".venv"
        for name, value in {
            "ROOT": root,
            "VENV": venv,
            "PYTHON": venv / "bin" / "python",
            "STAMP": venv / "stamp.json",
            "MARKER": venv / "unfinished",
            "REQUIREMENTS": self.requirements,
            "works": lambda: self.works,
            "create": self.create,
            "install": self.install,
            "missing": lambda wanted: [f"{n}=={v}" for n, v in wanted.items() if self.have.get(n) != v],
        }.items():
            monkeypatch.setattr(_setup, name, value)

    def create(self) -> None:
        self.done.append("create")
        (self.root / ".venv").mkdir(exist_ok=True)
        for path in (_setup.STAMP, _setup.MARKER):
            path.unlink(missing_ok=True)
        self.works, self.have = True, {}

    def install(self, packages: list[str]) -> None:
        assert _setup.MARKER.exists()
        self.done.append(packages)
        self.have |= dict(package.split("==") for package in packages)

    def setup(self, kind: str) -> list:
        self.done = []
        _setup.setup(kind)
        return self.done


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_first_run_makes_all_and_the_second_nothing(world: World) -> None:
    assert world.setup("test") == ["create", ["numpy==1.0", "pytest==2.0"]]
    assert world.setup("test") == []


def test_one_environment_serves_both_commands(world: World) -> None:
    assert world.setup("runtime") == ["create", ["numpy==1.0"]]
    assert world.setup("test") == [["pytest==2.0"]]
    assert world.setup("runtime") == []


def test_a_changed_pin_is_installed(world: World) -> None:
    world.setup("test")
    (world.requirements / "runtime.txt").write_text("numpy==1.1\n")
    assert world.setup("test") == [["numpy==1.1"]]
    assert world.setup("test") == []


def test_a_package_that_somebody_changed_is_put_back(world: World) -> None:
    world.setup("runtime")
    world.have["numpy"] = "9.9"
    assert world.setup("runtime") == [["numpy==1.0"]]


def test_an_environment_left_half_made_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(packages: list[str]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_setup, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            _setup.setup("runtime")
    assert world.setup("runtime") == ["create", ["numpy==1.0"]]


def test_an_environment_that_does_not_start_is_made_again(world: World) -> None:
    world.setup("runtime")
    world.works = False
    assert world.setup("runtime") == ["create", ["numpy==1.0"]]


def test_a_moved_environment_is_finished_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its console scripts and the editable install name the old place."""
    world.setup("runtime")
    monkeypatch.setattr(_setup, "VENV", world.root / "elsewhere")
    assert world.setup("runtime") == [[]]


def test_a_damaged_stamp_is_no_stamp(world: World) -> None:
    world.setup("runtime")
    _setup.STAMP.write_text("{")
    assert world.setup("runtime") == [[]]
    assert json.loads(_setup.STAMP.read_text()).keys() == {"runtime"}


def test_a_failing_step_is_an_exit_code_and_a_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(packages: list[str]) -> None:
        raise subprocess.CalledProcessError(3, ["python", "-m", "pip", "install"])

    monkeypatch.setattr(_setup, "install", fails)
    monkeypatch.setattr(sys, "argv", ["_setup.py", "runtime"])
    assert _setup.main() == 1
    assert "'-m pip install ...' failed with exit status 3" in capsys.readouterr().err


def test_versions_are_compared_in_the_environment_itself() -> None:
    """The real question, asked of the environment that runs these tests."""
    pins = _setup.pins(_setup.requirement_files("test"))
    assert pins["jax"] == "0.11.2" and pins["pytest"]
    assert _setup.PYTHON.exists() is False or _setup.missing({"pytest": "0.0.1"}) == ["pytest==0.0.1"]
