"""The programs of an engine, ready to be lowered: every bucket's step and the two that fill slots, with placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.batch import Bucket, Layout, Program
from jaxserve.mesh import sharding
from jaxserve.models.decoder import SplitDecoder
from jaxserve.runtime.state import INSTALL_ROWS, PLAIN_WORDS, State, install_plain, install_wide, wide_row_shapes
from jaxserve.runtime.step import BY_LANE, StepOptions, make_step, on_mesh, specs_of


def largest_first(buckets: Sequence[Bucket]) -> list[Bucket]:
    """A fixed order: the widest mixed program first, since its workspace decides the pool."""
    return sorted(buckets, key=lambda bucket: (bucket.program is not Program.MIXED, -bucket.rows, bucket.program.value))


def name_of(bucket: Bucket, plain: bool = False) -> str:
    """How progress lines and files call a step program."""
    return f"{bucket.program.value} {bucket.rows}{' plain' if plain else ''}"


def lower_step(
    split: SplitDecoder, bucket: Bucket, options: StepOptions, shapes: State, mesh: Mesh, plain: bool = False
) -> Callable[[], jax.stages.Lowered]:
    """A function that lowers the bucket's step; every placement is fixed here, so warm-up and serving agree."""
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
    jitted = jax.jit(step, donate_argnums=1, out_shardings=(places, by_lane))
    return lambda: jitted.lower(leaves, shapes, vector)


def lower_installs(
    shapes: State, lanes: int, vocab_rows: int, mesh: Mesh
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """The two programs that fill slots."""
    everywhere, by_lane = sharding(mesh), sharding(mesh, "data")
    rows = jax.ShapeDtypeStruct((lanes, INSTALL_ROWS, PLAIN_WORDS), jnp.int32, sharding=by_lane)
    wide = jax.tree.map(lambda leaf: replace_sharding(leaf, everywhere), wide_row_shapes(lanes, vocab_rows))
    wide = replace(wide, slot_Z=replace_sharding(wide.slot_Z, by_lane))
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes.slots)
    programs = {"install_plain": (install_plain, rows), "install_wide": (install_wide, wide)}

    def lower(function: Callable, argument: Any) -> jax.stages.Lowered:
        specs = specs_of(shapes.slots)
        mapped = on_mesh(function, mesh, in_specs=(specs, specs_of(argument)), out_specs=specs)
        return jax.jit(mapped, donate_argnums=0, out_shardings=places).lower(shapes.slots, argument)

    return {name: functools.partial(lower, *program) for name, program in programs.items()}


def replace_sharding(leaf: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The same shape and dtype, placed there."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
