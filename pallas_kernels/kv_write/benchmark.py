"""The timed cases of kv_write and their data on the device: takes a case id, gives a problem and its variants.

The pools go from call to call with the queries, so that each call writes them in place; XLA copies them twice in a
chain, before its first call and after it.
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
from pallas_kernels.kv_write import mosaic_gpu, xla
from pallas_kernels.kv_write.kernel import Tuning
from pallas_kernels.rotary import Rotary
from pallas_kernels.timing import Problem, Step, sets_needed

_PAGE_TOKENS = 64
# "kv_write HEADS/KV_HEADS tROWS [form]"; head dimension 128, all of it turns, no bias and no norm, where not said.
# "glm4": half of the dimensions turn, interleaved, with a bias; "norm": half turn, with norms of queries and keys.
CASE_IDS = (
    "kv_write 32/2 t16",
    "kv_write 32/2 t256",
    "kv_write 32/2 t8192",
    "kv_write 32/2 t16 glm4",
    "kv_write 32/2 t8192 glm4",
    "kv_write 96/8 t16 norm",
    "kv_write 96/8 t8192 norm",
    "kv_write 32/32 t8192",
)
PATTERN = re.compile(r"kv_write (\d+)/(\d+) t(\d+)(?: (glm4|norm))?")
_HEAD_DIM, _EPS = 128, 1e-6
_FORMS = {None: Rotary(128), "glm4": Rotary(64, interleaved=True), "norm": Rotary(64)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Fed:
    """What a call gives the next: the queries of all calls before, so that none is left out; as an array, the last."""

    queries: tuple[jax.Array, ...]  # [T, N, G, E]
    k_PNKE: jax.Array
    v_PNKE: jax.Array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.queries[-1], dtype)


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; rows go to random places of a pool that they fill."""
    heads, kv_heads, rows, form = PATTERN.fullmatch(case_id).groups()
    N, T, E, rotary = int(kv_heads), int(rows), _HEAD_DIM, _FORMS[form]
    G = int(heads) // N
    P = -(-T // _PAGE_TOKENS)
    moved = 2 * T * N * (G + 2) * E * 2
    sets = sets_needed(moved)
    keys = iter(jax.random.split(jax.random.key(0), sets + 8))
    place = np.random.default_rng(0).permutation(P * _PAGE_TOKENS)[:T].astype(np.int32)
    angle = jax.random.uniform(next(keys), (T, rotary.dims // 2), jnp.float32, 0, 6.28)

    def random(*shape: int) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(next(keys))

    scales = (random(E), random(E)) if form == "norm" else ()
    extras = {"bias_NSE": random(N, G + 2, E) if form == "glm4" else None, "scales_2E": scales}
    rest = (jnp.cos(angle), jnp.sin(angle), *map(jnp.asarray, divmod(place, _PAGE_TOKENS)))
    qkv = [(random(T, N, G + 2, E),) for _ in range(sets)]
    fed = Fed((), random(P, N, _PAGE_TOKENS, E), random(P, N, _PAGE_TOKENS, E))

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        exact, more = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (arrays, extras))
        return xla.run(*exact, **more, rotary=rotary, eps=_EPS if form == "norm" else None)[0]

    return Problem(
        case_id=case_id,
        first=fed,  # pyright: ignore[reportArgumentType] - a tree of arrays
        shared=(rest, extras),  # pyright: ignore[reportArgumentType] - trees of arrays
        sets=qkv,
        reference=lambda: reference(fed.k_PNKE, fed.v_PNKE, qkv[0][0], *rest),
        least_bytes=moved + 4 * T * rotary.dims + 8 * T,
        operations=4 * T * N * (G + 2) * E,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernel and the XLA form, too."""
    form = PATTERN.fullmatch(problem.case_id)[4]
    options = {"rotary": _FORMS[form], "eps": _EPS if form == "norm" else None}
    found = {"mosaic_gpu": _step(mosaic_gpu.run, **options)}
    if every:
        found["mosaic_gpu tokens=2"] = _step(mosaic_gpu.run, tuning=Tuning(tokens=2), **options)
        found["mosaic_gpu tokens=4"] = _step(mosaic_gpu.run, tuning=Tuning(tokens=4), **options)
        found["xla"] = _step(xla.run, **options)
    return found


def _step(run: Callable[..., tuple[jax.Array, ...]], **options: Any) -> Step:
    def step(fed: Any, shared: tuple[Any, ...], own: tuple[jax.Array, ...]) -> Any:
        rest, extras = shared
        q_TNGE, k_PNKE, v_PNKE = run(fed.k_PNKE, fed.v_PNKE, *own, *rest, **extras, **options)
        return Fed((*fed.queries, q_TNGE), k_PNKE, v_PNKE)

    return step
