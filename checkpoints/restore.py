"""Takes a converted checkpoint and the wanted shapes; gives parameters in the wanted shardings, on any devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from checkpoints.assemble import FLOATS, list_faults
from checkpoints.load import has_mtp
from checkpoints.names.mlp import SHARED
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

    Shared experts are stored as parameters of their own, whatever the mesh; they are read in front of the others where
    they are wanted there. Raises CheckpointError where the checkpoint holds less, more (but for all of MTP layers) or
    something else.
    """
    stored = stored_tensors(directory)
    pairs = joined_pairs(stored, wanted)
    check_tree(directory, as_joined(stored, pairs), wanted)
    context = ocp.Context()
    context.pytree.loading.partial_load = bool(pairs or left_out(stored, wanted))
    try:
        with context:
            arrays = ocp.load(directory.absolute(), {name: want for name, want in wanted.items() if name not in pairs})
        for name, shared in pairs.items():
            # One at a time: while it is copied to the devices the host holds it, too.
            arrays[name] = jax.block_until_ready(read_joined(directory, name, shared, wanted[name]))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: cannot be read: {first_line(error)}") from error
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise CheckpointError(f"{directory}: {name} was not restored")
    return {name: arrays[name] for name in wanted}


def joined_pairs(stored: Mapping[str, TensorInfo], wanted: Wanted) -> dict[str, str]:
    """Wanted experts -> the stored shared ones that are to be the first of them."""
    pairs: dict[str, str] = {}
    for name in wanted:
        block, _, parameter = name.rpartition(".")
        if name in stored and parameter in SHARED:
            shared = f"{block}.{SHARED[parameter]}"
            if shared in stored and shared not in wanted:
                pairs[name] = shared
    return pairs


def as_joined(stored: Mapping[str, TensorInfo], pairs: Mapping[str, str]) -> dict[str, TensorInfo]:
    """What the checkpoint holds, each pair put together."""
    found = {name: info for name, info in stored.items() if name not in pairs.values()}
    for name, shared in pairs.items():
        count, *each = stored[name].shape
        count += math.prod(stored[shared].shape) // math.prod(each)
        found[name] = TensorInfo((count, *each), stored[name].dtype)
    return found


def read_joined(directory: Path, name: str, shared: str, want: jax.ShapeDtypeStruct) -> jax.Array:
    """Shared experts, then the others, as one array: each device's part is read into place."""
    experts, side_by_side = open_array(directory, name), open_array(directory, shared)
    width = experts.shape[2]
    starts = range(0, side_by_side.shape[1], width)
    first = [side_by_side[:, start : start + width][tensorstore.d[1].translate_to[0]] for start in starts]
    both = tensorstore.concat([tensorstore.stack(first), experts], axis=0)
    return jax.make_array_from_callback(
        want.shape, want.sharding, lambda index: both[index].read().result().astype(want.dtype, copy=False)
    )


def open_array(weights: Path, name: str, *, write: bool = False) -> tensorstore.TensorStore:
    """One array of a finalized Orbax checkpoint."""
    base = {"driver": "file", "path": f"{weights.resolve()}/state/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True, write=write).result()


def first_line(error: Exception) -> str:
    """Orbax's and TensorStore's texts run over many lines; the first says it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
