"""Takes a step's number and the options; gives its rates: arguments of the compiled step, so nothing compiles anew."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from demo_model.train.options import Options


class Rates(NamedTuple):
    """Of one step, float32."""

    learning: np.float32
    mtp_weight: np.float32
    bias: np.float32


def rates(step: int, steps: int, options: Options) -> Rates:
    """Linear warm-up, then a cosine to `last_rate`; the MTP weight falls and the bias rate ends near the end, as in
    DeepSeek-V3's training (arXiv 2412.19437, 4.2: 0.3, then 0.1 from 10 T of 14.8 T tokens; 0.001, then 0 from 14.3 T).
    """
    warm = min(1.0, (step + 1) / options.warmup_steps)
    done = min(1.0, max(0, step - options.warmup_steps) / max(1, steps - options.warmup_steps))
    cosine = options.last_rate + (1 - options.last_rate) * (1 + math.cos(math.pi * done)) / 2
    mtp_weight = options.mtp_weight if step < steps * 2 // 3 else options.last_mtp_weight
    bias = options.bias_rate if step < steps * 9 // 10 else 0.0
    return Rates(np.float32(options.rate * warm * cosine), np.float32(mtp_weight), np.float32(bias))
