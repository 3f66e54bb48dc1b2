"""Takes a reader, a name table and the wanted shapes; gives parameters on their devices, without any file between."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from checkpoints.assemble import assemble, check_names, list_faults
from checkpoints.names.table import NameTable
from checkpoints.readers.reader import Reader
from jaxserve.errors import CheckpointError

IN_FLIGHT_BYTES = 1 << 30  # host copies that may wait for their transfer

type Wanted = Mapping[str, jax.ShapeDtypeStruct]  # each with its sharding
type Place = Callable[[str, np.ndarray], jax.Array]


def load_weights(reader: Reader, table: NameTable, wanted: Wanted, place: Place | None = None) -> dict[str, jax.Array]:
    """Every wanted parameter, cast to its dtype on the host and placed in its sharding, one after the other.

    Raises CheckpointError naming everything that does not fit, before any tensor is read.
    """
    check_targets(table, wanted)
    check_names(reader, table)
    place = place or (lambda name, array: jax.device_put(array, wanted[name].sharding))
    placed: dict[str, jax.Array] = {}
    waiting: list[jax.Array] = []
    for name, want in wanted.items():
        array = place(name, assemble(reader, table.targets[name], np.dtype(want.dtype)))
        placed[name] = array
        waiting.append(array)
        if sum(one.nbytes for one in waiting) > IN_FLIGHT_BYTES:
            jax.block_until_ready(waiting)
            waiting.clear()
    return placed


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
