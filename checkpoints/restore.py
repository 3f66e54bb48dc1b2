"""Takes a converted checkpoint and the wanted shapes; gives parameters in the wanted shardings, on any devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from checkpoints.assemble import FLOATS, list_faults
from checkpoints.load import has_mtp
from checkpoints.names.table import MTP
from checkpoints.readers.reader import TensorInfo
from jaxserve.errors import CheckpointError

WEIGHTS_NAME = "weights"  # the Orbax checkpoint inside a converted one

type Wanted = Mapping[str, jax.ShapeDtypeStruct]  # each with its sharding


def stored_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes that an Orbax checkpoint holds; needs no particular devices.

    Raises CheckpointError where it is damaged or unfinished.
    """
    try:
        tree = ocp.metadata(directory.absolute()).metadata
        return {name: TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{directory}: not a whole Orbax checkpoint: {first_line(error)}") from error


def check_tree(directory: Path, stored: Mapping[str, TensorInfo], wanted: Wanted) -> None:
    """Orbax casts silently and takes subsets, so compare first.

    Raises CheckpointError listing missing, extra and misshapen tensors, and those whose dtype no plain cast makes.
    """
    both = [name for name in wanted if name in stored]
    faults = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "extra": sorted(stored.keys() - wanted.keys() - left_out(stored, wanted)),
        "misshapen": [
            f"{name} {stored[name]}, expected {list(wanted[name].shape)}"
            for name in both
            if stored[name].shape != tuple(wanted[name].shape)
        ],
        "of another kind of dtype": [
            f"{name} {stored[name]}, expected {wanted[name].dtype}"
            for name in both
            if not same_kind(stored[name].dtype, np.dtype(wanted[name].dtype))
        ],
    }
    if any(faults.values()):
        raise CheckpointError(f"{directory}: the checkpoint does not fit the model: {list_faults(faults)}")


def left_out(stored: Mapping[str, TensorInfo], wanted: Wanted) -> set[str]:
    """MTP layers' parameters, where none of them is wanted: a decoder runs without them, and they take memory."""
    return set() if has_mtp(wanted) else {name for name in stored if name.startswith(MTP)}


def same_kind(stored: np.dtype, wanted: np.dtype) -> bool:
    """Equal, or both ordinary floats."""
    return stored == wanted or (stored in FLOATS and wanted in FLOATS)


def restore(directory: Path, wanted: Wanted) -> dict[str, jax.Array]:
    """All wanted parameters; each device reads the chunks of its own part.

    Raises CheckpointError where the checkpoint holds less, more (but for all of MTP layers) or something else.
    """
    stored = stored_tensors(directory)
    check_tree(directory, stored, wanted)
    context = ocp.Context()
    context.pytree.loading.partial_load = bool(left_out(stored, wanted))
    try:
        with context:
            arrays = ocp.load(directory.absolute(), dict(wanted))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: cannot be read: {first_line(error)}") from error
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise CheckpointError(f"{directory}: {name} was not restored")
    return arrays


def first_line(error: Exception) -> str:
    """Orbax's and TensorStore's texts run over many lines; the first says it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
