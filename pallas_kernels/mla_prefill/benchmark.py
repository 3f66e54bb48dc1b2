"""The timed cases of mla_prefill and their data on the device: takes a case id, gives a problem and its variants.

A plain case is the attention kernel alone over ready expanded keys and values, as the rival is timed; "with expansion"
is the whole op: latent pages in, the expansion of keys and values included.
"""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import Device
from pallas_kernels.mla_prefill import mosaic_gpu, xla
from pallas_kernels.mla_prefill.common import PAGE_TOKENS, Tuning
from pallas_kernels.mla_prefill.kernel import attend
from pallas_kernels.mla_prefill.tiles import plan
from pallas_kernels.timing import Problem, Step, sets_needed

# "mla_prefill [KEY/VALUE] hHEADS bREQUESTS qTOKENS [kvTOKENS] [with expansion]": the last qTOKENS of kvTOKENS (all) of
# each request; head dimensions 192/128, or 256/256 as GLM-4.7-Flash has them.
CASE_IDS = (
    "mla_prefill h16 b1 q4k",
    "mla_prefill h128 b1 q4k",
    "mla_prefill h16 b4 q2k",
    "mla_prefill h16 b1 q16k",
    "mla_prefill h16 b8 q1k kv8k",
    "mla_prefill 256/256 h20 b1 q4k",
    "mla_prefill h16 b1 q4k with expansion",
    "mla_prefill h128 b1 q4k with expansion",
    "mla_prefill h16 b1 q8k with expansion",
    "mla_prefill h16 b8 q1k kv8k with expansion",
    "mla_prefill 256/256 h20 b1 q4k with expansion",
)
PATTERN = re.compile(r"mla_prefill (256/256 )?h(\d+) b(\d+) q(\d+)k(?: kv(\d+)k)?( with expansion)?")
_ROPE, _RANK = 64, 512


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case; pages in random order."""
    wide, heads, requests, new, cached, whole = PATTERN.fullmatch(case_id).groups()
    H, R, queries, length = int(heads), int(requests), int(new) * 1024, int(cached or new) * 1024
    nope_dim, value_dim = (192, 256) if wide else (128, 128)
    T, M = R * queries, length // PAGE_TOKENS
    read_bytes = R * length * ((_RANK + _ROPE) * 2 if whole else H * (nope_dim + value_dim) * 2)
    # Expansions of the same pages would be made once for several calls: no set is used twice.
    sets = 48 if whole else sets_needed(read_bytes)
    keys = jax.random.split(jax.random.key(0), 4)
    q, latent, key_up, value_up = (
        jax.jit(lambda key, shape=shape, scale=scale: (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16))(key)
        for key, shape, scale in (
            (keys[0], (T, H, nope_dim + _ROPE), 1.0),
            (keys[1], ((sets if whole else 1) * R * M, PAGE_TOKENS, _RANK + _ROPE), 1.0),
            (keys[2], (H, nope_dim, _RANK), _RANK**-0.5),
            (keys[3], (H, value_dim, _RANK), _RANK**-0.5),
        )
    )
    order = np.random.default_rng(0).permutation(latent.shape[0]).astype(np.int32).reshape(-1, R, M)
    tables = [jnp.asarray(table) for table in order]
    start_R = jnp.arange(R, dtype=jnp.int32) * queries
    borders = (start_R, jnp.full((R,), queries, jnp.int32), jnp.full((R,), length - queries, jnp.int32))

    @jax.jit
    def reference(*arrays: jax.Array) -> jax.Array:
        exact = (array.astype(jnp.float32) for array in arrays)
        return xla.run(*exact, tables[0], *borders, scale=(nope_dim + _ROPE) ** -0.5, device=device)

    @jax.jit
    def expand(latent: jax.Array, up: jax.Array) -> jax.Array:
        rows = latent[tables[0]].reshape(-1, _RANK + _ROPE)[:, :_RANK]
        return jnp.einsum("zr,hnr->hzn", rows, up).reshape(-1, up.shape[1])

    if whole:
        made = [(table,) for table in tables]
        shared = (q, latent, key_up, value_up, *borders)
    else:
        made = [(expand(latent, key_up), expand(latent, value_up)) for _ in range(sets)]
        shared = (q, latent, tables[0], *borders)
    pairs = R * (queries * (length - queries) + queries * (queries + 1) // 2)
    return Problem(
        case_id=case_id,
        first=jnp.zeros((T, H, value_dim), jnp.bfloat16),
        shared=shared,
        sets=made,
        reference=lambda: reference(q, latent, key_up, value_up),  # as arguments: constants would be copied
        least_bytes=read_bytes + T * H * (nope_dim + _ROPE + value_dim) * 2,
        operations=2 * H * (nope_dim + _ROPE + value_dim) * pairs,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: all tunings of the kernel and the XLA form, else only what is chosen."""
    tuning = Tuning.of(256 if problem.first.shape[2] == 128 else 448)
    tunings = {"mosaic_gpu": tuning}
    if every:
        tunings["mosaic_gpu free"] = replace(tuning, turns=False)
    if "expansion" not in problem.case_id:
        return {name: _attention(tuning) for name, tuning in tunings.items()}
    found = {name: _whole(device, tuning) for name, tuning in tunings.items()}
    if every:
        found["mosaic_gpu fine steps"] = _whole(device, replace(tuning, up_columns=32))
        found["mosaic_gpu 64k table"] = _whole(device, tuning, 1024)
        found["mosaic_gpu 160k table"] = _whole(device, tuning, 2560)
        found["xla"] = _xla(device)
    return found


def _attention(tuning: Tuning) -> Step:
    """The attention kernel alone. It writes over what it is fed with, so that the calls stay in a row."""

    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        q, latent, table, *borders = shared
        T, H, _ = q.shape
        tiles, where = plan(
            *borders,
            tokens=T,
            request_tokens=table.shape[1] * PAGE_TOKENS,
            heads=H,
            row_bytes=(own[0].shape[1] + own[1].shape[1]) * 2,
            scratch_rows=own[0].shape[0],
        )
        pass_1, options = jnp.zeros((1,), jnp.int32), {"scale": q.shape[2] ** -0.5, "tuning": tuning, "into_THV": fed}
        return attend(q, latent, *own, table, pass_1, tiles, where.sizes_3, **options)

    return step


def _whole(device: Device, tuning: Tuning, pages: int = 0) -> Step:
    """The op; it, too, writes over what it is fed with. pages: a wider table, whose worst case may need more passes."""

    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        q, latent, key_up, value_up, *borders = shared
        table = jnp.pad(own[0], ((0, 0), (0, max(0, pages - own[0].shape[1]))))
        arrays = (q, latent, key_up, value_up, table, *borders)
        return mosaic_gpu.run(*arrays, scale=q.shape[2] ** -0.5, device=device, tuning=tuning, into_THV=fed)

    return step


def _xla(device: Device) -> Step:
    """Its output is narrower than the queries, of which it takes the place in part."""

    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        q, latent, key_up, value_up, *borders = shared
        q = q.at[:1, :1, : fed.shape[2]].set(fed[:1, :1])
        return xla.run(q, latent, key_up, value_up, own[0], *borders, scale=q.shape[2] ** -0.5, device=device)

    return step
