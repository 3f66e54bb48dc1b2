"""The device mesh, and the one table that maps logical axes of weights and state to mesh axes.

Axes are of type Auto: XLA's partitioner places the collectives. `jax.make_mesh` would give Explicit axes, under which a
product contracted over a sharded axis raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError

AXES = ("data", "expert", "tensor")

# logical axis -> mesh axis; None is replicated
RULES: tuple[tuple[str, str | None], ...] = (
    ("vocab", "tensor"),
    ("embed", None),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("experts", "expert"),
    ("pages", None),
)


def make_mesh(devices: Sequence[jax.Device], tensor: int = 1) -> Mesh:
    """A ("data", "expert", "tensor") mesh over the first `tensor` devices.

    Raises ConfigError where there are fewer devices than asked for.
    """
    if len(devices) < tensor:
        raise ConfigError(f"--tensor-parallel-size: got {tensor}, allowed: at most {len(devices)}, the devices present")
    return Mesh(np.array(devices[:tensor]).reshape(1, 1, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh, *logical_axes: str | None) -> NamedSharding:
    """The NamedSharding of an array whose dimensions carry these logical axes; no axes at all is replicated."""
    table = dict(RULES)
    return NamedSharding(mesh, PartitionSpec(*(table[axis] if axis else None for axis in logical_axes)))
