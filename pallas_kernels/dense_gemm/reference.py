"""dense_gemm in fp32 numpy, stage by stage: what every implementation is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pallas_kernels.dense_gemm.contract import Stage, X


def dense_chain(stages: tuple[Stage, ...], arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """fp32 [T, N] of each stage, of inputs of any float dtype; weights are [P, N, K]. Nothing is rounded between."""
    given = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    made: list[np.ndarray] = []
    for number, stage in enumerate(stages):
        w_PNK = given[f"w{number}"]
        tokens = given["x"] if stage.source == X else made[stage.source]
        if stage.norm_eps is not None:
            rms_T1 = np.sqrt((tokens * tokens).mean(axis=1, keepdims=True) + stage.norm_eps)
            tokens = tokens / rms_T1 * given[f"norm{stage.source}"]
        y_PTN = np.stack([tokens[:, : w_NK.shape[1]] @ w_NK.T for w_NK in w_PNK])
        y_TN = y_PTN[0] / (1 + np.exp(-y_PTN[0])) * y_PTN[1] if stage.gated else y_PTN[0]
        if stage.bias:
            y_TN = y_TN + given[f"bias{number}"]
        if stage.residual is not None:
            y_TN = y_TN + (given[f"residual{number}"] if stage.residual == X else made[stage.residual])
        made.append(y_TN)
    return made
