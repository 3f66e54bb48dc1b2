"""Finished programs on disk: takes compiled programs, gives them back to a later start that need not trace them.

XLA's own cache (`compile.py`) is asked with a lowered program, and lowering is most of a start: a GPU kernel goes
through Python for seconds, and threads do not help. A file here is found by a digest of everything that the program is
made from, so a start that finds it neither traces, lowers nor compiles. XLA's cache stays as the second line.

The files are pickles, as those of `jax.experimental.serialize_executable` are: whoever may write to the folder may run
code in this process, so it is made for its owner alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable

import pallas_kernels
from jaxserve import environment
from jaxserve.runtime.compile import compile_all

log = logging.getLogger("jaxserve.saved")

SEAL_BYTES = 32  # a SHA-256 of the rest stands first: a file cut short is known before it is unpickled
KEPT_BYTES = 4 << 30  # more than this and the programs that were not used for longest go
POOL_DRIFT = 0.95  # a kept pool of at least this share of what fits now is taken again

# JAX's settings that say where things lie and what is written of them, not what a program computes.
NO_FACT = re.compile("cache|_dir$|dump_ir|logging|log_compiles|platforms$|visible_devices$")


@dataclass(frozen=True, slots=True)
class Pool:
    """The cache's size that a start came to, and the workspace that it left room for."""

    num_pages: int
    workspace_bytes: int

    def pages_for(self, fitting_pages: int) -> int:
        """Its own size where that fits and is about as much as fits now, else what fits: other programs then."""
        return self.num_pages if POOL_DRIFT * fitting_pages <= self.num_pages <= fitting_pages else fitting_pages


@dataclass(frozen=True, slots=True)
class Shelf:
    """The saved programs of one folder (None: there are none, nothing is kept) for these devices.

    `facts`: a digest of what all of them are made from.
    """

    folder: Path | None
    devices: tuple[jax.Device, ...]
    facts: str

    def about(self, *facts: object) -> Shelf:
        """The part of the shelf that further facts hold for; their repr must be the same in every process."""
        return replace(self, facts=digest_of(self.facts, facts))

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program of this name; None where there is none. A file that cannot be used is deleted."""
        path = self._path(name, "program")
        if path is None or not path.exists():
            return None
        try:
            data = memoryview(path.read_bytes())
            if hashlib.sha256(data[SEAL_BYTES:]).digest() != data[:SEAL_BYTES]:
                raise ValueError("it is damaged")
            program, in_tree, out_tree = pickle.loads(data[SEAL_BYTES:])
            loaded = serialize_executable.deserialize_and_load(
                program, in_tree, out_tree, backend=self.devices[0].client, execution_devices=self.devices
            )
        except Exception as error:  # pickle, JAX and the device's runtime each raise their own
            log.warning("deleted the saved program %s: %s", path.name, first_line(error))
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used: see `drop_oldest`
        return loaded

    def holds(self, name: str) -> bool:
        """Whether there is a file for it, usable or not."""
        path = self._path(name, "program")
        return path is not None and path.exists()

    def save(self, name: str, program: jax.stages.Compiled, fresh: bool) -> None:
        """Keep a program; one that cannot be kept is logged, and compiled anew at the next start.

        `fresh`: it came from no cache. XLA:CPU leaves the machine code out where it writes one that did.
        """
        path = self._path(name, "program")
        if path is None or not (fresh or self.devices[0].platform != "cpu"):
            return
        try:
            data = pickle.dumps(serialize_executable.serialize(program))
            write_whole(path, hashlib.sha256(data).digest() + data)
        except Exception as error:  # as in `load`
            log.warning("cannot keep the program %s for the next start: %s", name, first_line(error))

    def drop(self, names: Iterable[str]) -> None:
        """Delete these programs."""
        for name in names:
            if path := self._path(name, "program"):
                path.unlink(missing_ok=True)

    def load_pool(self) -> Pool | None:
        """The pool that an earlier start with these facts came to."""
        path = self._path("pool", "json")
        try:
            return Pool(**json.loads(path.read_text())) if path else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning("cannot use %s: %s", path, first_line(error))
            return None

    def save_pool(self, pool: Pool) -> None:
        """Keep the pool's size."""
        path = self._path("pool", "json")
        try:
            if path:
                write_whole(path, json.dumps(asdict(pool)).encode())
        except OSError as error:
            log.warning("cannot keep the size of the cache for the next start: %s", first_line(error))

    def _path(self, name: str, suffix: str) -> Path | None:
        return self.folder / f"{name.replace(' ', '_')}-{self.facts[:32]}.{suffix}" if self.folder else None


def open_shelf(folder: Path | None, devices: Sequence[jax.Device]) -> Shelf:
    """The shelf in `folder`, which is made where it is missing; one without a folder where that fails."""
    try:
        if folder:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            drop_oldest(folder, KEPT_BYTES)
    except OSError as error:
        log.warning("programs are not kept for the next start: %s", first_line(error))
        folder = None
    return Shelf(folder, tuple(devices), digest_of(common_facts(devices)) if folder else "")


def load_or_compile(
    shelf: Shelf,
    lowerings: dict[str, Callable[[], jax.stages.Lowered]],
    threads: int,
    progress: Callable[[str], None],
    check: Callable[[jax.stages.Compiled], None] = lambda program: None,
) -> tuple[dict[str, jax.stages.Compiled], set[str]]:
    """Load what is on the shelf, compile and keep the rest (`compile_all`); also the names of those loaded.

    `check` is called with every program before it is kept; what it raises ends the call.
    """

    def keep(name: str, program: jax.stages.Compiled, fresh: bool) -> None:
        check(program)
        shelf.save(name, program, fresh)

    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        found = zip(lowerings, pool.map(shelf.load, lowerings), strict=True)
        loaded = {name: program for name, program in found if program is not None}
    for program in loaded.values():
        check(program)
    missing = {name: lower for name, lower in lowerings.items() if name not in loaded}
    if loaded:
        progress(f"loaded {len(loaded)} of {len(lowerings)} programs that an earlier start compiled")
    if missing:  # said before: the first may take a minute
        progress(f"compiling {next(iter(missing))}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}")
    compiled = compile_all(missing, threads, lambda name, n, total: progress(f"compiled {name} ({n} of {total})"), keep)
    return loaded | compiled, set(loaded)


def common_facts(devices: Sequence[jax.Device]) -> tuple[object, ...]:
    """What every program of this process on these devices depends on."""
    client = devices[0].client
    return (
        sources_digest(),
        (jax.__version__, jaxlib.__version__, flax.__version__, client.platform_version),
        environment.compiler_settings(),
        sorted((name, str(value)) for name, value in jax.config.values.items() if not NO_FACT.search(name)),
        [(device.id, device.device_kind, getattr(device, "compute_capability", "")) for device in devices],
        (jax.process_index(), jax.process_count()),
        processor() if client.platform == "cpu" else "",
    )


def sources_digest() -> str:
    """Of all files of the two packages that programs are traced from; a tuned number counts like a line of code."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent):
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(
                    f"{path.relative_to(package.parent)} {path.stat().st_size}\n".encode() + path.read_bytes()
                )
    return digest.hexdigest()


def processor() -> str:
    """The host's instruction set: a program for the CPU made on another host may hold instructions that it lacks."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return platform.processor()


def digest_of(*facts: object) -> str:
    """SHA-256 of their repr."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def first_line(error: BaseException) -> str:
    """An error in one line of a log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the place and rename: a reader, or a start after a crash, sees the whole file or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="new-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def drop_oldest(folder: Path, kept_bytes: int) -> None:
    """Delete the files that were not used for longest until the rest takes no more than `kept_bytes`."""
    files = sorted(((path.stat(), path) for path in folder.iterdir()), key=lambda pair: -pair[0].st_mtime)
    total_bytes = 0
    for stat, path in files:
        total_bytes += stat.st_size
        if total_bytes > kept_bytes:
            path.unlink(missing_ok=True)
