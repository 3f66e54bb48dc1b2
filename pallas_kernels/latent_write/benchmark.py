"""The timed cases of latent_write and their data on the device: takes a case id, gives a problem and its variants.

The pool goes from call to call with the queries, so that each call writes it in place; XLA copies it twice in a chain,
before its first call and after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.latent_write import mosaic_gpu, xla
from pallas_kernels.latent_write.kernel import Tuning
from pallas_kernels.rotary import Rotary
from pallas_kernels.timing import Problem, Step, sets_needed

# "latent_write [hHEADS] tROWS": 512 + 64 dimensions, interleaved, queries of 128 + 64; 16 heads and no low-rank query
# in front of the latent (DeepSeek-V2-Lite), else one of 1536 (V3).
CASE_IDS = (
    "latent_write t16",
    "latent_write t256",
    "latent_write t8192",
    "latent_write h128 t16",
    "latent_write h128 t8192",
)
PATTERN = re.compile(r"latent_write (?:h(\d+) )?t(\d+)")
_PAGE_TOKENS, _RANK, _NOPE, _ROPE, _Q_RANK, _EPS = 64, 512, 128, 64, 1536, 1e-6
_OPTIONS = {"rotary": Rotary(_ROPE, interleaved=True), "eps": _EPS}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Fed:
    """What a call gives the next: the queries of all calls before, so that none is left out; as an array, the last."""

    queries: tuple[jax.Array, ...]  # [T, H, C]
    latent_PKL: jax.Array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.queries[-1], dtype)


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; rows go to random places of a pool that they fill."""
    heads, rows = PATTERN.fullmatch(case_id).groups()
    H, T, L = int(heads or 16), int(rows), _RANK + _ROPE
    W = L + (_Q_RANK if heads else 0)
    P = -(-T // _PAGE_TOKENS)
    moved = 2 * 2 * T * (L + H * _ROPE)
    sets = sets_needed(moved)
    keys = iter(jax.random.split(jax.random.key(0), 2 * sets + 4))
    place = np.random.default_rng(0).permutation(P * _PAGE_TOKENS)[:T].astype(np.int32)
    angle = jax.random.uniform(next(keys), (T, _ROPE // 2), jnp.float32, 0, 6.28)

    def random(*shape: int) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(next(keys))

    shared = (random(_RANK), jnp.cos(angle), jnp.sin(angle), *map(jnp.asarray, divmod(place, _PAGE_TOKENS)))
    own = [(random(T, W), random(T, H, _NOPE + _ROPE)) for _ in range(sets)]
    fed = Fed((), random(P, _PAGE_TOKENS, L))

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        exact = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arrays]
        return xla.run(*exact, **_OPTIONS)[0]

    return Problem(
        case_id=case_id,
        first=fed,  # pyright: ignore[reportArgumentType] - a tree of arrays
        shared=shared,
        sets=own,
        reference=lambda: reference(*_arguments(fed, shared, own[0])),
        least_bytes=moved + 4 * T * _ROPE + 8 * T,
        operations=4 * T * (L + H * _ROPE),
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernel and the XLA form, too."""
    found = {"mosaic_gpu": _step(mosaic_gpu.run)}
    if every:
        found["mosaic_gpu tokens=2"] = _step(mosaic_gpu.run, tuning=Tuning(tokens=2))
        found["mosaic_gpu tokens=4"] = _step(mosaic_gpu.run, tuning=Tuning(tokens=4))
        found["xla"] = _step(xla.run)
    return found


def _arguments(fed: Fed, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """In the order of the contract."""
    scale, *rest = shared
    down, q = own
    return (fed.latent_PKL, down, scale, q, *rest)


def _step(run: Callable[..., tuple[jax.Array, jax.Array]], **options: Any) -> Step:
    def step(fed: Any, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> Any:
        turned_THC, latent_PKL = run(*_arguments(fed, shared, own), **_OPTIONS, **options)
        return Fed((*fed.queries, turned_THC), latent_PKL)

    return step
