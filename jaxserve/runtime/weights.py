"""Weights on the device, in the decoder's leaf order: random ones made there, or whatever a loader brings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import SplitDecoder

Load = Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]

RANDOM_STD = 0.02


def load_weights(split: SplitDecoder, load: Load) -> list[jax.Array]:
    """Ask the loader for every parameter, by name, shape, dtype and sharding.

    Raises CheckpointError where the loader brings less, more, or something else than was asked for.
    """
    wanted = dict(zip(split.names, split.stored, strict=True))
    arrays = load(wanted)
    if arrays.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
        raise CheckpointError(f"weights do not fit the model: missing {missing[:5]}, unknown {extra[:5]}")
    for name, want in wanted.items():
        got = arrays[name]
        if not isinstance(got, jax.Array) or (got.shape, got.dtype) != (want.shape, want.dtype):
            raise CheckpointError(f"{name}: got {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}")
    return [split.finish(name, arrays[name], leaf) for name, leaf in zip(split.names, split.leaves, strict=True)]


def random_weights(split: SplitDecoder, seed: int) -> list[jax.Array]:
    """N(0, 0.02) matrices, norm scales 1, biases 0. Spread like this, so that routers and samplers do not tie."""
    makers: dict[tuple, Callable[[jax.Array], jax.Array]] = {}

    def make(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        kind = "one" if name.endswith(".scale") else "zero" if name.endswith("_bias") else "normal"
        signature = (kind, leaf.shape, leaf.dtype, leaf.sharding)
        if signature not in makers:
            makers[signature] = jax.jit(lambda key: fill(kind, leaf, key), out_shardings=leaf.sharding)
        return makers[signature](key)

    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(split.leaves))  # the device's own fast generator
    return [make(name, leaf, key) for name, leaf, key in zip(split.names, split.leaves, keys, strict=True)]


def fill(kind: str, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """One parameter's values; drawn in bfloat16 where that is the target, so that no float32 copy is made."""
    if kind != "normal":
        return jnp.full(leaf.shape, kind == "one", leaf.dtype)
    return jax.random.normal(key, leaf.shape, leaf.dtype) * jnp.asarray(RANDOM_STD, leaf.dtype)
