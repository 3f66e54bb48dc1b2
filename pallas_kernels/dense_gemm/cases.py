"""Named cases of dense_gemm and their random inputs, for tests, checks and benchmark alike."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from pallas_kernels.dense_gemm.contract import Stage, X

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DenseCase:
    """Sizes of one call: of each stage the sum and the columns; the tokens are `width` wide."""

    name: str
    tokens: int
    stages: tuple[Stage, ...]
    sizes: tuple[tuple[int, int], ...]  # (columns N, inner K)
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Of the tokens."""
        return self.sizes[0][1]


def block(hidden: int, mixed: int, width: int, router: int, after: int) -> tuple[tuple[Stage, ...], tuple]:
    """What lies between two attentions: output projection, router, feed-forward block, the next projections."""
    stages = (
        Stage(residual=X, normed=True),
        Stage(source=0, norm_eps=EPS, residual=X),
        Stage(source=0, norm_eps=EPS, gated=True),
        Stage(source=2, residual=0, normed=True),
        Stage(source=3, norm_eps=EPS),
    )
    return stages, ((hidden, mixed), (router, hidden), (width, hidden), (hidden, width), (after, hidden))


def one(name: str, tokens: int, columns: int, inner: int, dtype: str = "bfloat16", **stage: object) -> DenseCase:
    """A single product."""
    return DenseCase(name, tokens, (Stage(**stage),), ((columns, inner),), dtype)  # pyright: ignore[reportArgumentType]


CASES = (
    one("plain", 3, 256, 192, "float32"),
    one("one token, half a tile", 1, 192, 128),
    one("bias and residual", 8, 320, 64, bias=True, residual=X),
    one("gate and up", 17, 192, 128, gated=True),
    one("fp16", 4, 128, 64, "float16", residual=X),
    one("exact", 3, 192, 128, exact=True, bias=True),
    DenseCase("block", 5, *block(256, 192, 192, 128, 320)),
    DenseCase("block fp32", 2, *block(256, 192, 192, 128, 320), "float32"),
)


def make_inputs(case: DenseCase, seed: int) -> dict[str, np.ndarray]:
    """Random inputs by name, weights [P, N, K]."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(dtype)

    arrays = {"x": normal(case.tokens, case.width)}
    for number, (stage, (N, K)) in enumerate(zip(case.stages, case.sizes, strict=True)):
        arrays[f"w{number}"] = normal(1 + stage.gated, N, K, scale=K**-0.5)
        if stage.bias:
            arrays[f"bias{number}"] = normal(N)
        if stage.residual == X:
            arrays[f"residual{number}"] = normal(case.tokens, N)
        if stage.normed:
            arrays[f"norm{number}"] = normal(N, scale=0.1) + np.ones(N, dtype)
    return arrays
