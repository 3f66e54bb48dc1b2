"""Makes jaxserve/v1 from proto/jaxserve/v1 with grpcio-tools; `--check` only says whether the stubs are up to date."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("jaxserve/v1")


def generate(target: Path) -> list[Path]:
    """Write the stubs below `target`; returns their paths relative to it. Raises RuntimeError where protoc fails."""
    sources = sorted((ROOT / "proto" / PACKAGE).glob("*.proto"))
    includes = [f"-I{ROOT / 'proto'}", f"-I{files('grpc_tools') / '_proto'}"]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", *includes, *outputs, *map(str, sources)])
    if code:
        raise RuntimeError(f"protoc ended with code {code}")
    made = sorted((target / PACKAGE).glob("*_pb2*.py*"))
    for path in made:
        if path.name.endswith("_pb2_grpc.py") and "class" not in path.read_text():
            path.unlink()  # a file without services
    return [path.relative_to(target) for path in made if path.exists()]


def main() -> int:
    """Returns the exit code: 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = generate(Path(folder))
        texts = {path: (Path(folder) / path).read_text() for path in made}
    stale = [path for path, text in texts.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    if not check:
        for path in stale:
            (ROOT / path).write_text(texts[path])
    verb = "out of date" if check else "written"
    print(f"{len(texts)} files, {len(stale)} {verb}" + "".join(f"\n  {path}" for path in stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
