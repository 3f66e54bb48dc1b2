"""Rules of the house that a reader of one file cannot see kept: late imports, the environment, names, stray words."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house import source

ROOMS = source.python_files(*source.PACKAGES)
WRITTEN = source.python_files(*source.PACKAGES, "scripts", "tests")
LATE_IMPORTS = {"pallas_kernels/registry.py", "pallas_kernels/bench.py", "jaxserve/__init__.py"}


def test_top_level_is_what_the_design_says() -> None:
    allowed = {"README.md", "pyproject.toml", "LICENSE", "NOTICE", *source.PACKAGES, "proto", "tests", "scripts"}
    tops = {path.split("/")[0] for path in source.files()}
    assert {top for top in tops if not top.startswith(".")} <= allowed


def test_packages_have_an_init_and_it_is_empty() -> None:
    folders = {path.rsplit("/", 1)[0] for path in source.files() if path.endswith(".py")}
    inside = {folder for folder in folders if folder.split("/")[0] in source.PACKAGES}
    for folder in sorted(inside):
        init = f"{folder}/__init__.py"
        assert init in source.files(), f"{init} is missing, so the wheel would leave the folder out"
        assert folder == "jaxserve" or source.text(init) == "", f"{init} is not empty"


@pytest.mark.parametrize("path", [path for path in WRITTEN if source.text(path).strip()])
def test_modules_open_with_what_they_do(path: str) -> None:
    docstring = ast.get_docstring(source.tree(path))
    assert docstring, f"{path} has no docstring"
    assert len(docstring.splitlines()[0]) > 20, f"{path}: the first line says nothing"


def late_imports(path: str) -> list[int]:
    """Lines of imports inside functions, by statement or by importlib."""
    inside = [node for piece in source.functions([path]) for node in ast.walk(piece.node)]
    statements = {node.lineno for node in inside if isinstance(node, ast.Import | ast.ImportFrom)}
    calls = {node.lineno for node in inside if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func)}
    return sorted(statements | calls)


def test_imports_stand_at_the_top() -> None:
    found = {path: late_imports(path) for path in ROOMS if path not in LATE_IMPORTS}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_late_imports_are_seen() -> None:
    assert late_imports("jaxserve/__init__.py")


def test_only_one_module_reads_the_environment() -> None:
    pattern = re.compile(r"\bos\.(environ|getenv|putenv)\b|from os import .*(environ|getenv)")
    readers = {path for path in ROOMS if pattern.search(source.text(path))}
    assert readers == {"jaxserve/environment.py"}


def test_no_global_state() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in ROOMS
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Global) or (isinstance(node, ast.FunctionDef) and node.name.startswith("get_current_"))
    ]
    assert found == []


def words(path: str) -> list[tuple[int, str]]:
    """Identifiers and string literals of a file with their lines; docstrings and comments may say what they like."""
    tree = source.tree(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.Name):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.arg):
            found.append((node.lineno, node.arg))
        elif isinstance(node, source.FunctionNode | ast.ClassDef):
            found.append((node.lineno, node.name))
    return found


def test_models_are_facts() -> None:
    """No model's name in layers, runtime or engine: a config.json becomes a ModelSpec, and that is all they see."""
    # llama3 is also what config.json calls a rule of scaling the rotary frequencies, whoever uses it.
    names = re.compile("llama(?!3$)|deepseek|glm|qwen|mistral|gemma|smollm", re.IGNORECASE)
    paths = source.python_files("jaxserve/layers", "jaxserve/runtime", "jaxserve/engine")
    assert [f"{path}:{line} {word}" for path in paths for line, word in words(path) if names.search(word)] == []


def test_quantities_say_their_unit() -> None:
    """A parameter or field called just `timeout` or `size` leaves the reader to guess."""
    bare = {"timeout", "size", "length", "duration", "delay", "interval", "latency"}
    found: list[str] = []
    for path in ROOMS:
        for node in ast.walk(source.tree(path)):
            name = node.arg if isinstance(node, ast.arg) else None
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            if name in bare:
                found.append(f"{path}:{node.lineno} {name}")
    assert found == []


def test_public_functions_say_what_they_do() -> None:
    """A function without an underscore is read by somebody who did not write it; nested ones and dunders are not."""
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path in ROOMS
        for node in source.tree(path).body
        if isinstance(node, source.FunctionNode | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


STRAY = {
    "a package registry": r"pypi\." r"org|python" r"hosted|registry\.npm" r"js|deb\.deb" r"ian\.org",
    "a path of one machine": r"(?<![\w.~}])/(wo" r"rk|ro" r"ot|fa" r"rm)/[A-Za-z.]",
    "a loose end": r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|NotImplemented" r"Error",
}


@pytest.mark.parametrize("what", STRAY)
def test_no_stray_words(what: str) -> None:
    pattern = re.compile(STRAY[what])
    texts = [path for path in source.files() if path != "LICENSE" and source.GENERATED not in path]
    assert [path for path in texts if pattern.search(source.text(path))] == []


KERNEL_FILES = ("contract.py", "reference.py", "cases.py", "NOTES.md")


def test_a_kernel_folder_holds_its_contract_reference_cases_and_notes() -> None:
    folders = {path.split("/")[1] for path in source.files() if re.match(r"pallas_kernels/\w+/\w+\.py$", path)}
    missing = {
        f"pallas_kernels/{folder}/{name}"
        for folder in folders
        for name in KERNEL_FILES
        if f"pallas_kernels/{folder}/{name}" not in source.files()
    }
    assert missing == set()


def test_kernel_folders_do_not_import_each_other() -> None:
    found = []
    for path in source.python_files("pallas_kernels"):
        if path.count("/") < 2:
            continue
        own = path.split("/")[1]
        for other in re.findall(r"(?:from|import) pallas_kernels\.(\w+)", source.text(path)):
            if other != own and f"pallas_kernels/{other}.py" not in source.files():
                found.append(f"{path} imports {other}")
    assert found == []
