"""The programs of an engine, ready to be lowered: every bucket's step and those that fill slots, with placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.batch import Bucket, Layout, Program
from jaxserve.mesh import sharding
from jaxserve.models.decoder import SplitDecoder
from jaxserve.runtime.state import (
    INSTALL_ROWS,
    PLAIN_WORDS,
    State,
    install_plain,
    install_table,
    install_wide,
    wide_row_shapes,
)
from jaxserve.runtime.step import BY_LANE, StepOptions, make_step, on_mesh, specs_of


def largest_first(buckets: Sequence[Bucket]) -> list[Bucket]:
    """A fixed order: the widest mixed program first, since its workspace decides the pool."""
    return sorted(buckets, key=lambda bucket: (bucket.program is not Program.MIXED, -bucket.rows, bucket.program.value))


def name_of(bucket: Bucket, plain: bool = False) -> str:
    """How progress lines and files call a step program."""
    return f"{bucket.program.value} {bucket.rows}{' plain' if plain else ''}"


@dataclass(frozen=True, slots=True)
class Lowering:
    """A program that is yet to be lowered; calling it lowers it here. Every placement is fixed, so that all agree."""

    function: Callable
    arguments: tuple  # trees of ShapeDtypeStructs with shardings
    donated: int  # which argument
    places: Any  # of the results: a tree of shardings, or a prefix of one

    def __call__(self) -> jax.stages.Lowered:
        """Trace and lower in this process."""
        return self.lower_as(self.function)

    def lower_as(self, function: Callable) -> jax.stages.Lowered:
        """Lower another function that computes the same in this one's place."""
        jitted = jax.jit(function, donate_argnums=self.donated, out_shardings=self.places)
        return jitted.lower(*self.arguments)


def lower_step(
    split: SplitDecoder, bucket: Bucket, options: StepOptions, shapes: State, mesh: Mesh, plain: bool = False
) -> Lowering:
    """The bucket's step."""
    by_lane = sharding(mesh, "data")
    words = Layout(bucket, options.shape).words
    vector = jax.ShapeDtypeStruct((options.shape.lanes, words), jnp.int32, sharding=by_lane)
    leaves, places = list(split.leaves), jax.tree.map(lambda leaf: leaf.sharding, shapes)
    step = on_mesh(
        make_step(split, bucket, options, plain),
        mesh,
        in_specs=(specs_of(leaves), specs_of(shapes), BY_LANE),
        out_specs=(specs_of(shapes), BY_LANE),
    )
    return Lowering(step, (leaves, shapes, vector), donated=1, places=(places, by_lane))


def lower_steps(
    split: SplitDecoder, buckets: Sequence[Bucket], options: StepOptions, shapes: State, mesh: Mesh
) -> dict[str, Lowering]:
    """Every bucket's step by name in the order of the buckets, then the plain forms, which are a GPU's only.

    No plain forms where steps are deterministic: which form a step takes depends on all its requests, and two programs
    are not promised to round alike.
    """
    steps = {name_of(bucket): lower_step(split, bucket, options, shapes, mesh) for bucket in buckets}
    if options.device.platform != "cpu" and not options.deterministic:
        steps |= {
            name_of(bucket, plain=True): lower_step(split, bucket, options, shapes, mesh, plain=True)
            for bucket in buckets
            if bucket.program is not Program.SCORED
        }
    return steps


def lower_installs(shapes: State, lanes: int, vocab_rows: int, mesh: Mesh) -> dict[str, Lowering]:
    """The programs that fill slots: parameters, wide rows of them, and block tables of those that share pages."""
    everywhere, by_lane = sharding(mesh), sharding(mesh, "data")
    rows = jax.ShapeDtypeStruct((lanes, INSTALL_ROWS, PLAIN_WORDS), jnp.int32, sharding=by_lane)
    wide = jax.tree.map(lambda leaf: replace_sharding(leaf, everywhere), wide_row_shapes(lanes, vocab_rows))
    wide = replace(wide, slot_Z=replace_sharding(wide.slot_Z, by_lane))
    words = 1 + shapes.table_SM.shape[1]
    tables = jax.ShapeDtypeStruct((lanes, INSTALL_ROWS, words), jnp.int32, sharding=by_lane)

    def lowering(function: Callable, changed: Any, argument: Any) -> Lowering:
        specs = specs_of(changed)
        mapped = on_mesh(function, mesh, in_specs=(specs, specs_of(argument)), out_specs=specs)
        places = jax.tree.map(lambda leaf: leaf.sharding, changed)
        return Lowering(mapped, (changed, argument), donated=0, places=places)

    return {
        "install_plain": lowering(install_plain, shapes.slots, rows),
        "install_wide": lowering(install_wide, shapes.slots, wide),
        "install_table": lowering(install_table, shapes.table_SM, tables),
    }


def replace_sharding(leaf: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The same shape and dtype, placed there."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
