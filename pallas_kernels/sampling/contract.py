"""Draws one token a row from what top_k, top_p and min_p leave: takes probabilities or logits from the sampler, gives
it token ids. No sort, and one uniform number a row.

What is kept. A row's elements have weights: its probabilities, or exp((logit - largest) / temperature).
1. top_k keeps the elements not below the k-th largest one; equal ones stay together, so there may be more than k.
2. top_p keeps of these the elements not below the largest threshold whose weights reach top_p of what step 1 kept.
3. min_p keeps of these the weights that reach min_p times the largest one.
The token is where the running sum of the kept weights, in the order of the ids, passes `uniform` times their whole sum.
So it is a function of the row's own numbers: the same alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import registry
from pallas_kernels.arguments import require
from pallas_kernels.device import Device

OP = "sampling"


@dataclass(frozen=True, slots=True)
class SamplingShapes:
    """Static sizes of one call."""

    rows: int  # B
    vocab: int  # V
    logits: bool  # a temperature is given


def sample(
    x_BV: jax.Array,
    uniform_B: jax.Array,
    top_k_B: jax.Array | None = None,
    top_p_B: jax.Array | None = None,
    min_p_B: jax.Array | None = None,
    temperature_B: jax.Array | None = None,
    *,
    device: Device,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """One token a row; see the top of this file.

    Args:
      x_BV: fp32 probabilities, not negative, of any sum; with `temperature_B`, logits: -inf is never drawn.
      uniform_B: fp32 in [0, 1).
      top_k_B: int32; below 1, or V and more: off. A filter that is None is off for all rows.
      top_p_B: fp32; 1 and more: off; 0: the largest weight and those equal to it.
      min_p_B: fp32 in [0, 1]; 0: off.
      temperature_B: fp32 above 0; None: x_BV are probabilities.
      device, implementation: see registry.select.

    Returns:
      Tokens int32 [B], and the number of elements kept, int32 [B]. A row whose weights have no positive finite sum
      gives 0 and 0.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "x", x_BV, "B V", dtypes=("float32",))
    rows, vocab = x_BV.shape
    named = {"uniform": uniform_B, "top_k": top_k_B, "top_p": top_p_B, "min_p": min_p_B, "temperature": temperature_B}
    for name, array in named.items():
        wanted = "int32" if name == "top_k" else "float32"
        if array is not None and (array.shape != (rows,) or array.dtype != wanted):
            raise ValueError(f"{OP}: {name} is {array.dtype} {array.shape}, must be {wanted} ({rows},).")
    shapes = SamplingShapes(rows, vocab, temperature_B is not None)
    chosen = registry.select(OP, shapes, device, implementation)
    filters = {"top_k_B": top_k_B, "top_p_B": top_p_B, "min_p_B": min_p_B}
    return chosen.run(x_BV, uniform_B, **filters, temperature_B=temperature_B, device=device)
