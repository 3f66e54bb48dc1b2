"""The timed cases of moe_route and their data on the device: takes a case id, gives a problem and its variants.

The results of all calls are kept, so that none is left out; a call starts when the one before has ended.
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
from pallas_kernels.moe_route import mosaic_gpu, xla
from pallas_kernels.moe_route.contract import Routed, RouteRule
from pallas_kernels.moe_route.mosaic_gpu import Tuning
from pallas_kernels.timing import Problem, Step

# "moe_route xEXPERTS topK [sSHARED] tTOKENS": softmax (DeepSeek-V2-Lite); "... groups ...": sigmoid, bias, 4 of 8
# groups, top-8 (DeepSeek-V3); "... bias ...": sigmoid, bias, no groups, top-8 (GLM-4.5).
CASE_IDS = (
    "moe_route x64 top6 t1",
    "moe_route x64 top6 t16",
    "moe_route x64 top6 t64",
    "moe_route x64 top6 t256",
    "moe_route x64 top6 t8192",
    "moe_route x64 top6 s2 t1",
    "moe_route x64 top6 s2 t16",
    "moe_route x64 top6 s2 t8192",
    "moe_route x128 bias t16",
    "moe_route x256 groups t1",
    "moe_route x256 groups t16",
    "moe_route x256 groups t64",
    "moe_route x256 groups t256",
    "moe_route x256 groups t8192",
)
PATTERN = re.compile(r"moe_route x(\d+) (top(\d+)|groups|bias)(?: s(\d+))? t(\d+)")
_SETS = 16
_GROUPS = RouteRule("sigmoid", 8, num_groups=8, kept_groups=4, group_score="top2", renormalise=True, scale=2.5)
_BIAS = RouteRule("sigmoid", 8, renormalise=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Fed:
    """The results of all calls before; as an array, the sorted weights of the last."""

    results: tuple[Routed, ...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        routed = self.results[-1]
        live_A = np.arange(routed.row_A.size) < np.asarray(routed.size_X).sum()
        return np.where(live_A, np.asarray(routed.weight_A), 0).astype(dtype)


def rule_of(case_id: str) -> tuple[RouteRule, int, int, int]:
    """Rule, experts, shared ones and tokens of a case."""
    experts, kind, top_k, shared, tokens = PATTERN.fullmatch(case_id).groups()
    rule = {"groups": _GROUPS, "bias": _BIAS}.get(kind) or RouteRule("softmax", int(top_k))
    return rule, int(experts), int(shared or 0), int(tokens)


def build(case_id: str, device: Device) -> Problem:
    """Random logits of a case; all tokens are live."""
    rule, X, S, T = rule_of(case_id)
    rng = np.random.default_rng(0)
    sets = [(jnp.asarray(2 * rng.standard_normal((T, X)), jnp.float32),) for _ in range(_SETS)]
    bias_X = None if rule.scoring == "softmax" else jnp.asarray(rng.standard_normal(X) / 10, jnp.float32)
    live_T = jnp.ones(T, bool)
    options = {"first": 0, "bias_X": bias_X, "rule": rule, "count": X, "shared": S}
    run = jax.jit(lambda logits_TX: xla.run(logits_TX, live_T, **options))
    return Problem(
        case_id=case_id,
        first=Fed(()),  # pyright: ignore[reportArgumentType] - a tree of arrays
        shared=(live_T, bias_X),  # pyright: ignore[reportArgumentType] - None where there is no bias
        sets=sets,
        reference=lambda: jnp.asarray(np.asarray(Fed((run(*sets[0]),)))),
        least_bytes=4 * T * (X + 3 * (S + rule.top_k)) + 4 * (S + X),
        operations=T * X * rule.top_k,
    )


def variants(problem: Problem, device: Device, every: bool) -> dict[str, Step]:
    """Named ways to run the op; `every`: other tunings of the kernels and the XLA form, too."""
    rule, X, S, T = rule_of(problem.case_id)
    options: dict[str, Any] = {"rule": rule, "count": X, "shared": S}
    found = {"mosaic_gpu": _step(mosaic_gpu.run, **options)}
    if every:
        few = T <= Tuning().one_launch
        changes = [{"tokens_each": n} for n in (1, 2, 8, 32)] + [{"one_launch": 0}] if few else [{"most_ctas": 264}]
        for change in changes:
            name = " ".join(f"{key}={value}" for key, value in change.items())
            found[f"mosaic_gpu {name}"] = _step(mosaic_gpu.run, tuning=Tuning(**change), **options)
        found["xla"] = _step(xla.run, **options)
    return found


def _step(run: Callable[..., Routed], **options: Any) -> Step:
    def step(fed: Any, shared: tuple[Any, ...], own: tuple[jax.Array, ...]) -> Any:
        live_T, bias_X = shared
        if fed.results:  # else XLA would fuse calls with each other
            own, _ = jax.lax.optimization_barrier((own, fed.results[-1]))
        return Fed((*fed.results, run(*own, live_T, first=0, bias_X=bias_X, **options)))

    return step
