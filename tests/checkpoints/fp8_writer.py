"""What a publisher of fp8 checkpoints does: quantise matrices, and write scales beside them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0  # of e4m3


def blocks_of(weight: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[ceil(out / rows), ceil(in / columns), rows, columns], zeros past the edges."""
    counts = [-(-have // each) for have, each in zip(weight.shape, block, strict=True)]
    padded = np.zeros((counts[0] * block[0], counts[1] * block[1]), np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.reshape(counts[0], block[0], counts[1], block[1]).swapaxes(1, 2)


def quantise_blocks(
    weight: np.ndarray, block: tuple[int, int] = (128, 128), power_of_two: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Weight e4m3 and its scales. Powers of two are rounded up first, and the weight divided by what is stored."""
    blocks = blocks_of(weight, block)
    scale = np.maximum(np.abs(blocks).max((2, 3)), 1e-12) / LARGEST
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale)))
    scale = scale.astype(np.float32)
    whole = (blocks / scale[:, :, None, None]).swapaxes(1, 2).reshape(blocks.shape[0] * block[0], -1)
    return whole[: weight.shape[0], : weight.shape[1]].astype(FP8), scale


def quantise_channels(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weight e4m3 and a scale for each row, [out, 1]."""
    scale = (np.abs(weight.astype(np.float32)).max(1, keepdims=True) / LARGEST).astype(np.float32)
    return (weight.astype(np.float32) / scale).astype(FP8), scale
