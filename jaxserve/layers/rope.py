"""Rotary position embedding: frequencies from a RopeSpec, and their angles once a step.

Scaling types follow transformers' `modeling_rope_utils` (5.17), which is what checkpoints are trained and tested with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Which dimensions rotate, how fast, and how they pair.

    kind: default | linear | llama3 | yarn. `rotary_dims` leading dimensions of a head rotate, the rest pass unchanged.
    interleaved: pairs (2i, 2i+1) instead of (i, i + rotary_dims / 2).
    """

    theta: float
    rotary_dims: int
    interleaved: bool = False
    kind: str = "default"
    factor: float = 1.0
    original_max_len: int = 0  # tokens: llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the corrected range to whole dimensions
    attention_factor: float = 1.0  # multiplies cos and sin (yarn's mscale)

    @property
    def rotary(self) -> Rotary:
        """What the kernels need of it."""
        return Rotary(self.rotary_dims, self.interleaved)


def inverse_frequencies(spec: RopeSpec) -> np.ndarray:
    """Angle per position of each pair, float32 [rotary_dims / 2]."""
    exponents = np.arange(0, spec.rotary_dims, 2, dtype=np.float32) / np.float32(spec.rotary_dims)
    plain = (1.0 / np.float32(spec.theta) ** exponents).astype(np.float32)
    scaled = {"default": lambda: plain, "linear": lambda: plain / spec.factor, "llama3": lambda: llama3(spec, plain)}
    return np.asarray((scaled | {"yarn": lambda: yarn(spec, plain)})[spec.kind](), np.float32)


def llama3(spec: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, a linear blend between."""
    wavelength = 2 * math.pi / plain
    ratio = spec.original_max_len / wavelength
    blend = (ratio - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    return plain / spec.factor * (1 - np.clip(blend, 0, 1)) + plain * np.clip(blend, 0, 1)


def yarn(spec: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """YaRN (arXiv 2309.00071, eq. 23): dimensions that turn often are kept, rare ones divided by `factor`."""
    dims = spec.rotary_dims

    def correction(turns: float) -> float:
        return dims * math.log(spec.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = correction(spec.beta_fast), correction(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def angles(spec: RopeSpec, position_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the positions, float32 [T, rotary_dims / 2] each; made once a step, used by every layer."""
    theta = position_T.astype(jnp.float32)[:, None] * inverse_frequencies(spec)
    return jnp.cos(theta) * spec.attention_factor, jnp.sin(theta) * spec.attention_factor
