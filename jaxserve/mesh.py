"""The device mesh, and the one table that maps logical axes of weights and state to mesh axes.

A step is one program for all devices, written for each device's own part (`jax.shard_map` over the whole mesh, see
`runtime/step.py`): what a module computes from a part of a sum it adds up over the axes named here, and nothing else
moves between devices. Kernels therefore always see local arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError

AXES = ("data", "expert", "tensor")

EVERY = (("expert", "tensor"), ("tensor",), ("expert",))

# Logical axis -> the mesh axes it may be cut over, in order of preference: the first whose size divides the dimension
# is taken. Attention, dense and shared feed-forward are cut over the expert axis too: those devices would otherwise
# compute the same thing.
RULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "vocab": EVERY,
    "embed": (),
    "heads": EVERY,
    "kv_heads": EVERY,
    "mlp": EVERY,
    "experts": (("expert",),),
    "expert_mlp": (("tensor",),),
    "lanes": (("data",),),
}


@dataclass(frozen=True, slots=True)
class Placement:
    """The mesh as numbers of devices along its axes; answers which axes cut a dimension."""

    data: int = 1
    expert: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> Placement:
        """That of a mesh made by `make_mesh`."""
        return cls(*(mesh.shape[axis] for axis in AXES))

    def size(self, axes: Sequence[str]) -> int:
        """Devices along these mesh axes together."""
        return int(np.prod([getattr(self, axis) for axis in axes], dtype=np.int64))

    def axes(self, logical: str | None, dimension: int) -> tuple[str, ...]:
        """The mesh axes that cut a dimension of this size, those of one device left out; none: each device has all."""
        for candidate in RULES[logical] if logical else ():
            if dimension % self.size(candidate) == 0:
                return tuple(axis for axis in candidate if getattr(self, axis) > 1)
        return ()

    def spec(self, logical: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """The PartitionSpec of an array of this shape whose dimensions carry these logical axes."""
        cut = [self.axes(name, dimension) for name, dimension in zip(logical, shape, strict=True)]
        return PartitionSpec(*((axes[0] if len(axes) == 1 else axes) if axes else None for axes in cut))


def total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Add up the devices' parts of a sum over these mesh axes; called inside the step's shard_map."""
    return lax.psum(x, axes) if axes else x


def index(axes: tuple[str, ...]) -> jax.Array | int:
    """This device's place along these mesh axes, in the order in which they cut a dimension."""
    return lax.axis_index(axes) if axes else 0


def make_mesh(devices: Sequence[jax.Device], tensor: int = 1, expert: int = 1, data: int = 1) -> Mesh:
    """A ("data", "expert", "tensor") mesh over the first data * expert * tensor devices.

    Raises ConfigError where there are fewer devices than that.
    """
    count = data * expert * tensor
    if len(devices) < count:
        raise ConfigError(
            f"--data-parallel-size x --expert-parallel-size x --tensor-parallel-size: got {data} x {expert} x {tensor} "
            f"= {count}, allowed: at most {len(devices)}, the devices present"
        )
    grid = np.array(devices[:count]).reshape(data, expert, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The NamedSharding of an array whose dimensions are cut over these mesh axes; none at all is replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))
