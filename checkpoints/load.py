"""Takes a reader, a name table and the wanted shapes; gives parameters on their devices, without any file between."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np

from checkpoints.assemble import assemble, check_duplicates, check_fit, list_faults
from checkpoints.names.table import MTP, NameTable
from checkpoints.readers.reader import Reader
from jaxserve.errors import CheckpointError

IN_FLIGHT_BYTES = 1 << 30  # host copies that may wait for their transfer

type Wanted = Mapping[str, jax.ShapeDtypeStruct]  # each with its sharding
type Place = Callable[[str, np.ndarray], jax.Array]


def load_weights(reader: Reader, table: NameTable, wanted: Wanted, place: Place | None = None) -> dict[str, jax.Array]:
    """Every wanted parameter, cast to its dtype on the host and placed in its sharding, one after the other.

    Those of MTP layers may be left out, all together; the files must then hold all of them or none. Raises
    CheckpointError naming everything that does not fit, before any tensor is read.
    """
    asked = table if has_mtp(wanted) else table.without_mtp()
    check_targets(asked, wanted)
    check_fit(reader, table if holds_mtp(reader, table) else asked)
    check_duplicates(reader, asked)
    place = place or (lambda name, array: jax.device_put(array, wanted[name].sharding))
    placed: dict[str, jax.Array] = {}
    waiting: list[jax.Array] = []
    for name, want in wanted.items():
        array = place(name, assemble(reader, asked.targets[name], np.dtype(want.dtype)))
        placed[name] = array
        waiting.append(array)
        if sum(one.nbytes for one in waiting) > IN_FLIGHT_BYTES:
            jax.block_until_ready(waiting)
            waiting.clear()
    return placed


def has_mtp(names: Iterable[str]) -> bool:
    """Whether some parameters are those of multi-token prediction layers."""
    return any(name.startswith(MTP) for name in names)


def holds_mtp(reader: Reader, table: NameTable) -> bool:
    """Whether the files hold anything of the model's MTP layers."""
    return any(re.fullmatch(table.mtp_sources, name) for name in reader.tensors)


def check_targets(table: NameTable, wanted: Wanted) -> None:
    """Table and decoder speak of the same parameters. Raises CheckpointError where a family's table is wrong."""
    faults = {
        "without a source": sorted(wanted.keys() - table.targets.keys()),
        "unknown to the model": sorted(table.targets.keys() - wanted.keys()),
        "misshapen": [
            f"{name} {list(table.targets[name].shape)}, expected {list(want.shape)}"
            for name, want in wanted.items()
            if name in table.targets and table.targets[name].shape != tuple(want.shape)
        ],
    }
    if any(faults.values()):
        raise CheckpointError(f"the name table does not fit the model: {list_faults(faults)}")
