"""Takes a Hugging Face directory or a GGUF file; gives a converted checkpoint: weights, config, tokenizer, record.

One parameter at a time, in batches of small ones, so that memory holds little; stacked parameters piece by piece.
Everything is made in `TARGET.partial` and renamed at the end. A killed run is taken up again where its journal ends.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from checkpoints.assemble import assemble_piece, check_names
from checkpoints.files import PROVENANCE_NAME, Kind, kind_of, partial_of
from checkpoints.load import check_targets, holds_mtp
from checkpoints.names.families import name_table
from checkpoints.names.table import NameTable
from checkpoints.provenance import Identity, Journal, checksum, identify, read_provenance, write_provenance
from checkpoints.readers.reader import Reader, TensorInfo, read_json, write_json
from checkpoints.restore import WEIGHTS_NAME, first_line, open_array, stored_tensors
from checkpoints.source import open_reader
from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import model_spec

DTYPES = ("auto", "bfloat16", "float32")
CHUNK_BYTES = 4 << 20  # of the stored arrays: what any sharding reads without much waste
BATCH_BYTES = 16 << 20  # small parameters are saved together: each save costs some 10 ms and a folder
LOCK_NAME = "lock"
MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")  # of a config.json: how many MTP layers there are

Step = Callable[[str, int], None]  # a parameter's name and bytes, when it is in the checkpoint


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be done: nothing is written yet, and all names and shapes are known to fit."""

    reader: Reader
    table: NameTable
    target: Path
    identity: Identity
    dtypes: Mapping[str, np.dtype]  # of each parameter

    @property
    def num_bytes(self) -> int:
        """Of all parameters."""
        return sum(info.num_bytes for info in self.tensors().values())

    def tensors(self) -> dict[str, TensorInfo]:
        """What the checkpoint will hold."""
        return {name: TensorInfo(target.shape, self.dtypes[name]) for name, target in self.table.targets.items()}

    def piece(self, name: str, index: int) -> np.ndarray:
        """A piece of a parameter, put together from the source."""
        return assemble_piece(self.reader, self.table.targets[name].pieces[index], self.dtypes[name])


def plan(source: Path, target: Path, dtype: str, *, dequantize: bool = False, without_mtp: bool = False) -> Conversion:
    """Open the source and check everything that can be checked before writing.

    `dtype`: bfloat16, float32, or auto, which keeps bfloat16 and makes all else float32, so that no value changes
    (with `dequantize`: the config's dtype, so fp8 becomes bfloat16). What the decoder keeps in float32, routers and
    their bias, is float32 whatever it says. `without_mtp` leaves out multi-token prediction layers.
    Raises CheckpointError or ModelError with one sentence.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"--dtype: got {dtype}, allowed: {', '.join(DTYPES)}")
    kind = kind_of(source)
    if kind is Kind.CONVERTED:
        raise CheckpointError(f"{source}: is converted already, expected: a Hugging Face directory or a GGUF file")
    reader = open_reader(source, kind, dequantize=dequantize)
    spec = model_spec(reader.config)
    table = name_table(reader.config["model_type"], spec)
    if dtype == "auto":
        dtype = "bfloat16" if spec.dtype == "bfloat16" else "float32"
    if without_mtp:
        table = table.without_mtp()
    elif spec.mtp_layers and not holds_mtp(reader, table):
        raise CheckpointError(
            f"{source}: the config names {spec.mtp_layers} MTP layer(s) and the files hold nothing of them; "
            "--without-mtp converts the rest"
        )
    wanted = parameter_shapes(spec, jnp.dtype(dtype), with_mtp=not without_mtp)
    check_targets(table, wanted)
    check_names(reader, table)
    dtypes = {name: np.dtype(want.dtype) for name, want in wanted.items()}
    identity = identify(reader, dtype, without_mtp)
    return Conversion(reader, table, target.absolute(), identity, dtypes)  # Orbax takes no relative paths


def is_finished(conversion: Conversion) -> bool:
    """Whether the target is there already, made by this very conversion.

    Raises CheckpointError where the target is anything else, which is never overwritten.
    """
    target = conversion.target
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if not (target / PROVENANCE_NAME).is_file():
        raise CheckpointError(f"{target}: is there already and is no converted checkpoint; choose another target")
    reason = conversion.identity.why_not(read_provenance(target).identity)
    if reason:
        raise CheckpointError(f"{target}: is there already, but {reason}; choose another target or remove it")
    return True


def convert(conversion: Conversion, step: Step = lambda name, num_bytes: None) -> None:
    """Write the checkpoint, or what an earlier run left undone; `step` also hears of what was there.

    Raises CheckpointError where writing fails; what is done stays in `TARGET.partial` for the next run.
    """
    partial = partial_of(conversion.target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial):
            journal = Journal(partial, conversion.identity)
            write_weights(conversion, partial / WEIGHTS_NAME, journal, step)
            write_files(conversion, partial, journal)
            journal.remove()
            (partial / LOCK_NAME).unlink()
            partial.rename(conversion.target)
    except OSError as error:
        raise cannot_write(partial, error) from error


def cannot_write(path: Path, error: Exception) -> CheckpointError:
    """A full disk, most often."""
    return CheckpointError(f"{path}: cannot be written: {first_line(error)}; run again to go on from what is done")


@contextmanager
def locked(partial: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    with (partial / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{partial}: another process is converting into it") from error
        yield


def write_weights(conversion: Conversion, weights: Path, journal: Journal, step: Step) -> None:
    """Save, finalize, then fill the stacked parameters; each part is skipped as far as it is done."""
    with orbax_context():
        if not weights.exists():
            save_missing(conversion, weights, journal, step)
            ocp.partial.finalize(weights)
        else:
            for name in conversion.table.targets:
                step(name, first_bytes(conversion, name))
    for leftover in weights.parent.glob(f"{weights.name}.partial_save*"):
        shutil.rmtree(leftover)
    for name, target in conversion.table.targets.items():
        if target.stacked:
            fill_stacked(conversion, weights, name, journal, step)
    check_stored(conversion, weights)


def orbax_context() -> ocp.Context:
    """How arrays are stored: raw, since weights hardly compress, in chunks that any sharding can read."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    return context


def first_bytes(conversion: Conversion, name: str) -> int:
    """What the first save writes of a parameter: all, or the first piece of a stacked one."""
    return TensorInfo(conversion.table.targets[name].pieces[0].shape, conversion.dtypes[name]).num_bytes


def save_missing(conversion: Conversion, weights: Path, journal: Journal, step: Step) -> None:
    """Save all parameters, of stacked ones the first piece, as far as the journal does not have them."""
    batch: dict[str, np.ndarray] = {}
    for name, target in conversion.table.targets.items():
        if journal.pieces_done(name):
            step(name, first_bytes(conversion, name))
            continue
        if batch and sum(array.nbytes for array in batch.values()) + first_bytes(conversion, name) > BATCH_BYTES:
            save_batch(weights, batch, journal, step)
        array = conversion.piece(name, 0)
        batch[name] = array[None] if target.stacked else array
        del array
    if batch:
        save_batch(weights, batch, journal, step)


def save_batch(weights: Path, batch: dict[str, np.ndarray], journal: Journal, step: Step) -> None:
    """Save some parameters and empty the batch.

    A run killed between save and journal saved this same batch: batches are cut alike whenever the journal ends with
    one. Orbax then refuses it whole, by an error of a private module.
    """
    try:
        ocp.partial.save(weights, batch)
    except Exception as error:
        if type(error).__name__ != "PartialSaveReplacementError":
            raise cannot_write(weights, error) from error
    journal.add({name: [checksum(array)] for name, array in batch.items()})
    for name, array in batch.items():
        step(name, array.nbytes)
    batch.clear()


def fill_stacked(conversion: Conversion, weights: Path, name: str, journal: Journal, step: Step) -> None:
    """Grow the stored array to all pieces, and write those that are not there one by one, each a range of chunks.

    Orbax stores arrays as zarr3 in one OCDBT key-value store; TensorStore writes into it what Orbax has no words for.
    """
    target = conversion.table.targets[name]
    count, done = len(target.pieces), journal.pieces_done(name)
    store = open_array(weights, name, write=True)
    if done < count:
        store = store.resize(exclusive_max=[count, *[None] * len(target.pieces[0].shape)]).result()
    for index in range(1, count):
        if index >= done:
            piece = conversion.piece(name, index)
            try:
                store[index].write(piece).result()
            except (OSError, ValueError) as error:
                raise cannot_write(weights, error) from error
            journal.add({name: [checksum(piece)]})
        step(name, first_bytes(conversion, name))


def check_stored(conversion: Conversion, weights: Path) -> None:
    """Orbax commits whatever it was given: compare with what should be there."""
    stored, wanted = stored_tensors(weights), conversion.tensors()
    if stored != wanted:
        odd = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
        raise CheckpointError(f"{weights}: was not written as asked: {', '.join(odd[:5])}; remove it to start anew")


def write_files(conversion: Conversion, partial: Path, journal: Journal) -> None:
    """Config (with the dtype and the layers that are stored now), tokenizer, record."""
    conversion.reader.copy_files(partial)
    config: Mapping[str, object] = read_json(partial / "config.json")
    kept = {name: value for name, value in config.items() if name not in ("torch_dtype", "dtype")}
    kept["torch_dtype"] = conversion.identity.dtype
    if conversion.identity.without_mtp:
        kept |= {name: 0 for name in MTP_FIELDS if name in kept}
    write_json(partial / "config.json", kept)
    write_provenance(partial, journal.provenance, conversion.tensors())
