"""The timed cases of dense_gemm and their data on the device: takes a case id, gives a problem and its variants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemm import mosaic_gpu, xla
from pallas_kernels.dense_gemm.cases import EPS, block
from pallas_kernels.dense_gemm.contract import Stage, X, make_sync
from pallas_kernels.device import Device
from pallas_kernels.timing import Problem, Step, sets_needed

# "dense_gemm COLUMNSxINNER mTOKENS [gate_up]": one product, of two weights with the activation for gate_up (COLUMNS of
# each). "dense_gemm v2lite_chain mTOKENS": the products of DeepSeek-V2-Lite's step without attention.
CASE_IDS = (
    "dense_gemm 13824x5120 m1",
    "dense_gemm 13824x5120 m16",
    "dense_gemm 13824x5120 m64",
    "dense_gemm 5120x13824 m1",
    "dense_gemm 5120x13824 m16",
    "dense_gemm 5120x13824 m64",
    "dense_gemm 13696x4096 m16 gate_up",
    "dense_gemm 2048x2048 m1",
    "dense_gemm 2048x2048 m16",
    "dense_gemm v2lite_chain m1",
    "dense_gemm v2lite_chain m16",
)
_PATTERN = re.compile(r"dense_gemm (?:v2lite_chain|(\d+)x(\d+)) m(\d+)( gate_up)?")
# DeepSeek-V2-Lite: the 6 routed and 2 shared experts of a token as one block; query, latent and key as one product; 64
# rows of the router, padded.
_LAYERS, _HIDDEN, _HEADS, _WIDTH, _ROUTER, _QKV, _VOCABULARY = 27, 2048, 2048, 11264, 128, 3648, 102400
_Run = Callable[..., list[jax.Array]]


def build(case_id: str, device: Device) -> Problem:
    """Random data for a case."""
    N, K, T, gated = _parse(case_id)
    if not N:
        return _chain(case_id, T)
    P = 1 + gated
    keys = jax.random.split(jax.random.key(0), 1 + sets_needed(P * N * K * 2))
    weights = [(_normal(key, (P, N, K), K**-0.5),) for key in keys[1:]]
    x = _normal(keys[0], (T, K), 1.0)

    @jax.jit
    def reference(x: jax.Array, w: jax.Array) -> jax.Array:
        exact = {"x": x.astype(jnp.float32), "w0": w.astype(jnp.float32)}
        return xla.run((Stage(gated=gated),), exact, device=device)[0]

    return Problem(
        case_id=case_id,
        first=jnp.zeros((T, N), jnp.bfloat16),
        shared=(x,),
        sets=weights,
        reference=lambda: reference(x, weights[0][0]),
        least_bytes=2 * (P * N * K + T * (K + N)),
        operations=2 * T * N * K * P,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernel and the XLA form, else only what is chosen."""
    N, _, T, gated = _parse(problem.case_id)
    stages = (Stage(gated=gated),) if N else block(1, 1, 1, 1, 1)[0]
    chosen = mosaic_gpu.tuning_for(T, stages)
    kernel = partial(mosaic_gpu.run, device=device)
    tunings = {"": chosen}
    if every:
        for blocks in (1, 2):
            tunings[f" blocks={blocks}"] = mosaic_gpu.fitted(replace(chosen, blocks=blocks), T, stages)
        tunings[" slots=8"] = replace(chosen, slots=min(8, chosen.slots))
    found: dict[str, Step] = {}
    for name, tuning in tunings.items():
        made = partial(kernel, tuning=tuning)
        found[f"mosaic_gpu{name}"] = _one(made, gated) if N else _walk(made, joined=True)
    if not every:
        return found
    plain = partial(xla.run, device=device)
    if N:
        return found | {"xla": _one_plain(plain, gated)}
    for ahead in ((), (8, 0), (4, 8), (4, 16)):
        made = partial(kernel, tuning=replace(chosen, ahead=ahead))
        found[f"mosaic_gpu ahead={ahead}"] = _walk(made, joined=True)
    for ahead in ((), (4, 0), (8, 0)):
        made = partial(kernel, tuning=replace(mosaic_gpu.tuning_for(T, (Stage(),)), ahead=ahead))
        found[f"mosaic_gpu single ahead={ahead}"] = _walk(made, joined=False)
    return found | {"xla": _walk(plain, joined=True)}


def _parse(case_id: str) -> tuple[int, int, int, bool]:
    found = _PATTERN.fullmatch(case_id)
    if found is None:
        raise ValueError(f"case id is {case_id!r}, must be like {CASE_IDS[0]!r} or {CASE_IDS[-1]!r}.")
    return int(found[1] or 0), int(found[2] or 0), int(found[3]), found[4] is not None


_normal = jax.jit(
    lambda key, shape, scale: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale), static_argnums=(1, 2)
)


def _one(run: _Run, gated: bool) -> Step:
    """A product that is written over the one before."""
    state: dict[str, Any] = {}

    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        if "sync" not in state:  # zeroed once a program, as once a step
            state["sync"] = jax.new_ref(make_sync())
        return run((Stage(gated=gated),), {"x": shared[0], "w0": own[0]}, sync=state["sync"], out_TN=fed)[0]

    return step


def _one_plain(run: _Run, gated: bool) -> Step:
    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        # XLA would drop a call whose result nobody needs: the tokens must seem to depend on the last result.
        return run((Stage(gated=gated),), {"x": shared[0] + 0 * fed[:1, :1], "w0": own[0]})[0]

    return step


def _chain(case_id: str, T: int) -> Problem:
    shapes = [(_QKV, _HIDDEN), (_HIDDEN, _HEADS), (_ROUTER, _HIDDEN), (2, _WIDTH, _HIDDEN), (_HIDDEN, _WIDTH)] * _LAYERS
    shapes.append((_VOCABULARY, _HIDDEN))
    keys = jax.random.split(jax.random.key(0), len(shapes) + 2)
    weights = tuple(_normal(key, shape, shape[-1] ** -0.5) for key, shape in zip(keys[2:], shapes, strict=True))
    norms = _normal(keys[1], (2 * _LAYERS + 1, _HIDDEN), 0.1) + 1
    own = (*weights, *norms)
    x = _normal(keys[0], (T, _HIDDEN), 1.0)
    exact = jax.jit(_walk(partial(xla.run, device=Device("gpu")), joined=True))

    def reference() -> jax.Array:
        # All weights in fp32 do not fit beside the others; the products are exact, what is rounded between them is not.
        return exact(jnp.zeros((T, _VOCABULARY), jnp.bfloat16), (x,), own)

    return Problem(
        case_id=case_id,
        first=jnp.zeros((T, _VOCABULARY), jnp.bfloat16),
        shared=(x,),
        sets=[own],
        reference=reference,
        least_bytes=2 * sum(w.size for w in own) + 2 * T * (_HIDDEN + _VOCABULARY),
        operations=2 * T * sum(w.size for w in weights),
    )


def _walk(run: _Run, joined: bool) -> Step:
    """The whole chain. joined: what lies between two attentions is one call; else each product is one."""

    def step(fed: jax.Array, shared: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> jax.Array:
        *layers, head = own[: 5 * _LAYERS + 1]
        norms = own[5 * _LAYERS + 1 :]
        weights = [w if w.ndim == 3 else w[None] for w in (*layers, head)]
        sync = jax.new_ref(make_sync())
        # The next call must seem to depend on this one's result.
        x_TD = shared[0] + 0 * fed[:1, :1]
        routed = jnp.zeros((x_TD.shape[0], _ROUTER), x_TD.dtype)
        stages = block(1, 1, 1, 1, 1)[0]
        scale = jax.lax.rsqrt((x_TD.astype(jnp.float32) ** 2).mean(axis=1, keepdims=True) + EPS)
        first = (x_TD * scale * norms[0]).astype(x_TD.dtype)
        [mixed] = run((Stage(),), {"x": first, "w0": weights[0]}, ahead=tuple(weights[1:3]), sync=sync)
        for layer in range(_LAYERS):
            w = weights[5 * layer + 1 : 5 * layer + 6]  # the last one is the next layer's, or the head
            arrays = {"x": mixed, "residual0": x_TD, "residual1": routed}
            arrays |= {f"w{i}": one for i, one in enumerate(w)}
            arrays |= {"norm0": norms[2 * layer + 1], "norm3": norms[2 * layer + 2]}
            after = weights[5 * layer + 6 : 5 * layer + 9]
            ahead = (after[0], after[2]) if len(after) > 2 else ()
            if joined:
                _, routed, _, x_TD, mixed = run(stages, arrays, ahead=ahead, sync=sync)
            else:
                routed, x_TD, mixed = _apart(run, arrays, ahead[:1], sync)
        return mixed.at[:, :_ROUTER].add(routed)

    return step


def _apart(run: _Run, arrays: dict[str, jax.Array], ahead: tuple[jax.Array, ...], sync: Any) -> tuple[jax.Array, ...]:
    """A block by one call a product, norms by XLA; each call fetches the next one's first weights."""

    def norm(x_TD: jax.Array, weight_D: jax.Array) -> jax.Array:
        x32 = x_TD.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt((x32 * x32).mean(axis=1, keepdims=True) + EPS) * weight_D).astype(x_TD.dtype)

    def one(
        x: jax.Array, number: int, then: tuple[jax.Array, ...], residual: jax.Array | None, **stage: Any
    ) -> jax.Array:
        given = {"x": x, "w0": arrays[f"w{number}"]} | ({} if residual is None else {"residual0": residual})
        return run((Stage(residual=None if residual is None else X, **stage),), given, ahead=then, sync=sync)[0]

    x_TD = one(arrays["x"], 0, (arrays["w2"],), arrays["residual0"])
    inner = norm(x_TD, arrays["norm0"])
    routed = one(inner, 1, (), arrays["residual1"])
    wide = one(inner, 2, (arrays["w3"],), None, gated=True)
    x_TD = one(wide, 3, (arrays["w4"],), x_TD)
    return routed, x_TD, one(norm(x_TD, arrays["norm3"]), 4, ahead, None)
