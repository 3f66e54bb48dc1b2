"""The vocabulary of the logits where it is cut over devices: what the sampler does across the cut.

Each device holds the logits of its own ids. Maxima, sums and best ids of a row travel, never the row: with L candidates
a device, L x devices numbers are gathered in place of V.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.mesh import index
from pallas_kernels.sampling.xla import draw


@dataclass(frozen=True, slots=True)
class Vocab:
    """`width` logits a row, cut into `shards` equal ranges over the mesh axes `axes` (none: not cut)."""

    width: int
    axes: tuple[str, ...] = ()
    shards: int = 1

    @property
    def local(self) -> int:
        """Logits a row on each device."""
        return self.width // self.shards

    @property
    def start(self) -> jax.Array | int:
        """The first id of this device."""
        return index(self.axes) * self.local

    def ids(self) -> jax.Array:
        """This device's ids, int32 [local]."""
        return jnp.arange(self.local, dtype=jnp.int32) + self.start

    def cut(self, x_QV: jax.Array) -> jax.Array:
        """This device's columns of an array that has them all."""
        if not self.axes:
            return x_QV
        return lax.dynamic_slice_in_dim(x_QV, self.start, self.local, axis=1)

    def place(self, ids: jax.Array) -> jax.Array:
        """Columns of ids on this device; those that are elsewhere point past the end (scatters drop them)."""
        if not self.axes:
            return ids
        column = ids - self.start
        return jnp.where((column >= 0) & (column < self.local), column, self.local)

    def at(self, x_QV: jax.Array, id_Q: jax.Array) -> jax.Array:
        """Each row's value at its id, [Q]."""
        column_Q = self.place(id_Q)
        value_Q = jnp.take_along_axis(x_QV, jnp.minimum(column_Q, self.local - 1)[:, None], axis=1)[:, 0]
        return self.sum(jnp.where(column_Q < self.local, value_Q, 0)) if self.axes else value_Q

    def sum(self, x: jax.Array) -> jax.Array:
        """Add up the devices' parts."""
        return lax.psum(x, self.axes) if self.axes else x

    def max(self, x: jax.Array) -> jax.Array:
        """The largest over the devices; NaN if one of them has a NaN."""
        if not self.axes:
            return x
        return jnp.max(lax.all_gather(x, self.axes), axis=0)  # pmax may drop a NaN

    def argmax(self, x_QV: jax.Array) -> jax.Array:
        """The id of each row's largest value, the lowest such id; int32 [Q]. A NaN counts as the largest."""
        best_Q = jnp.argmax(x_QV, axis=1).astype(jnp.int32)
        if not self.axes:
            return best_Q
        value_Q = jnp.take_along_axis(x_QV, best_Q[:, None], axis=1)[:, 0]
        value_NQ, id_NQ = lax.all_gather((value_Q, best_Q + self.start), self.axes)
        return jnp.take_along_axis(id_NQ, jnp.argmax(value_NQ, axis=0)[None], axis=0)[0]

    def top_k(self, x_QV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Each row's k largest values and their ids, best first, equal ones by id: [Q, k] each."""
        value_QK, column_QK = lax.top_k(x_QV, min(k, self.local))
        if not self.axes:
            return value_QK, column_QK
        both = lax.all_gather((value_QK, column_QK + self.start), self.axes, axis=1, tiled=True)
        value_QK, which_QK = lax.top_k(both[0], k)
        return value_QK, jnp.take_along_axis(both[1], which_QK, axis=1)

    def draw(self, weight_QV: jax.Array, uniform_Q: jax.Array) -> jax.Array:
        """The id at which each row's running sum passes `uniform` times the whole; int32 [Q]. The vocabulary is cut."""
        part_NQ = lax.all_gather(weight_QV.sum(axis=1), self.axes)
        end_NQ = jnp.cumsum(part_NQ, axis=0)
        target_Q = jnp.minimum(uniform_Q * end_NQ[-1], jnp.nextafter(end_NQ[-1], 0.0))
        shard_Q = jnp.minimum(jnp.sum(end_NQ <= target_Q, axis=0), self.shards - 1)
        before_Q = jnp.where(shard_Q > 0, jnp.take_along_axis(end_NQ, shard_Q[None] - 1, axis=0)[0], 0.0)
        id_Q = draw(weight_QV, target_Q - before_Q) + self.start
        return self.sum(jnp.where(shard_Q == index(self.axes), id_Q, 0))

    def logsumexp(self, x_QV: jax.Array) -> jax.Array:
        """log(sum(exp)) a row, [Q]."""
        if not self.axes:
            return jax.nn.logsumexp(x_QV, axis=1)
        peak_Q = self.max(x_QV.max(axis=1))
        safe_Q = jnp.where(jnp.isfinite(peak_Q), peak_Q, 0.0)
        return jnp.log(self.sum(jnp.exp(x_QV - safe_Q[:, None]).sum(axis=1))) + safe_Q
