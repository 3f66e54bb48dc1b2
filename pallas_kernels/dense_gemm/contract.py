"""Products of a few tokens with whole weights, alone or several in a row: takes tokens and weights from any layer.

Dimension keys: T tokens, K what is summed over, N columns of a result, P products at once (2: gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.device import Device

OP = "dense_gemm"
DTYPES = ("float32", "bfloat16", "float16")
X = -1  # the tokens that are given, as the source of a stage
SYNC_WORDS = 4096  # int32 counters, zeros, that a step's calls share


@dataclass(frozen=True, slots=True)
class Stage:
    """One product of a row of products: y = source w^T, then the norm's factor, activation, bias, residual.

    source: the tokens: X, or the number of an earlier stage. gated: two products, silu of the first times the second.
    norm_eps: of an RMSNorm of the source before the product; the source is an earlier stage with weights of a norm.
    bias: one is given. residual: what is added: X (one is given), or the number of an earlier stage; None: nothing.
    normed: weights of a norm are given, for the stages after this one. exact: the result is fp32, and nobody's source.
    """

    source: int = X
    gated: bool = False
    norm_eps: float | None = None
    bias: bool = False
    residual: int | None = None
    normed: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True)
class DenseGemmShapes:
    """Static sizes of one call: of each stage the sum and the columns."""

    tokens: int  # T
    stages: tuple[Stage, ...]
    inner: tuple[int, ...]  # K
    columns: tuple[int, ...]  # N
    dtype: str


def make_sync() -> jax.Array:
    """The counters that the calls of a step share: make a reference of them (`jax.new_ref`) once a step and hand it to
    each call. A call without one zeroes its own, a launch more."""
    return jnp.zeros((SYNC_WORDS,), jnp.int32)


def dense_gemm(
    x_TK: jax.Array,
    weight: jax.Array,
    *,
    bias_N: jax.Array | None = None,
    residual_TN: jax.Array | None = None,
    exact: bool = False,
    sync: Any = None,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """x w^T + bias + residual; of two weights silu(x w0^T) * (x w1^T).

    Args:
      x_TK: tokens, in the dtype of the weights.
      weight: [N, K], or [2, N, K] (gate and up), each [out, in] as Hugging Face keeps them.
      bias_N, residual_TN: added in fp32 before the result is rounded; not with two weights.
      exact: the result is not rounded.
      sync: a reference to `make_sync()`.
      device, implementation: see registry.select.

    Returns:
      [T, N] in x's dtype, fp32 where it is exact; sums and activation are fp32.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    residual = None if residual_TN is None else X
    stage = Stage(gated=weight.ndim == 3, bias=bias_N is not None, residual=residual, exact=exact)
    arrays = {"x": x_TK, "w0": weight, "bias0": bias_N, "residual0": residual_TN}
    given = {name: array for name, array in arrays.items() if array is not None}
    return dense_chain((stage,), given, sync=sync, device=device, implementation=implementation)[0]


def dense_chain(
    stages: Sequence[Stage],
    arrays: Mapping[str, jax.Array],
    *,
    ahead: Sequence[jax.Array] = (),
    sync: Any = None,
    device: Device,
    implementation: str = registry.AUTO,
) -> list[jax.Array]:
    """Several products in a row, with nothing but a norm between them.

    Args:
      stages: what each does.
      arrays: x [T, K]; of stage i w<i> [N, K] or [2, N, K], and where the stage has one bias<i> [N], residual<i>
        [T, N], norm<i> [N] (of the norm of its result). A source may be wider than K: its first K columns count.
      ahead: weights that the next call will read first; some of them are fetched into the L2 meanwhile.
      sync, device, implementation: as for dense_gemm.

    Returns:
      [T, N] of each stage.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    stages, arrays = tuple(stages), dict(arrays)
    for number in range(len(stages)):
        weight = arrays[f"w{number}"]
        arrays[f"w{number}"] = weight if weight.ndim == 3 else weight[None]
    shapes = _shapes(stages, arrays)
    chosen = registry.select(OP, shapes, device, implementation)
    whole = tuple(one if one.ndim == 3 else one[None] for one in ahead)
    return chosen.run(stages, arrays, ahead=whole, sync=sync, device=device)


def _shapes(stages: tuple[Stage, ...], arrays: dict[str, jax.Array]) -> DenseGemmShapes:
    x_TK = arrays["x"]
    T, dtype = x_TK.shape[0], x_TK.dtype
    wanted: dict[str, tuple[int, ...]] = {}
    inner, columns = [], []
    for number, stage in enumerate(stages):
        _check_order(number, stage, stages)
        P, N, K = arrays[f"w{number}"].shape
        width = x_TK.shape[1] if stage.source == X else columns[stage.source]
        if K > width or (len(stages) == 1 and width != K):
            raise ValueError(f"dense_gemm: w{number} sums over {K}, its tokens have {width} columns.")
        if P != 1 + stage.gated:
            raise ValueError(f"dense_gemm: w{number} holds {P} weights, must be {1 + stage.gated} for this stage.")
        wanted |= {f"w{number}": (P, N, K)}
        wanted |= {f"bias{number}": (N,)} if stage.bias else {}
        wanted |= {f"residual{number}": (T, N)} if stage.residual == X else {}
        wanted |= {f"norm{number}": (N,)} if stage.normed else {}
        if stage.residual not in (None, X) and columns[stage.residual] != N:
            raise ValueError(f"dense_gemm: stage {number} has {N} columns, its residual {columns[stage.residual]}.")
        if stage.norm_eps is not None and width != K:
            raise ValueError(f"dense_gemm: stage {number} norms all of its {width} columns, its weights have {K}.")
        inner.append(K)
        columns.append(N)
    if set(arrays) != {"x", *wanted}:
        raise ValueError(f"dense_gemm: arrays are {sorted(arrays)}, must be {sorted({'x', *wanted})} for these stages.")
    for name, shape in wanted.items():
        if arrays[name].shape != shape or arrays[name].dtype != dtype:
            one = arrays[name]
            raise ValueError(f"dense_gemm: {name} is {one.dtype} {one.shape}, must be {dtype} {shape}.")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dense_gemm: dtype is {dtype}, must be one of {', '.join(DTYPES)}.")
    return DenseGemmShapes(T, stages, tuple(inner), tuple(columns), str(dtype))


def _check_order(number: int, stage: Stage, stages: tuple[Stage, ...]) -> None:
    for name, other in (("source", stage.source), ("residual", stage.residual)):
        if other is not None and not X <= other < number:
            raise ValueError(f"dense_gemm: {name} of stage {number} is {other}, must be {X} to {number - 1}.")
        if other not in (None, X) and stages[other].exact:
            raise ValueError(f"dense_gemm: {name} of stage {number} is {other}, which is exact and nobody's source.")
    if stage.gated and (stage.bias or stage.residual is not None):
        raise ValueError(f"dense_gemm: stage {number} is gated, so it has neither bias nor residual.")
    if stage.exact and stage.normed:
        raise ValueError(f"dense_gemm: stage {number} is exact, so no norm follows it.")
    if stage.norm_eps is not None and (stage.source == X or not stages[stage.source].normed):
        raise ValueError(f"dense_gemm: stage {number} has a norm, so its source must be a stage with a norm's weights.")
