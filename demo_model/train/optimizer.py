"""Takes the decoder's parameter names; gives the optimizer of its matrices and vectors, for a learning rate of 1."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from demo_model.train.options import Options
from jaxserve.errors import ConfigError

OPTIMIZERS = ("muon", "adamw")
BIAS = "router_bias"  # moved by the experts' load, not by a gradient
RMS = 0.2  # of Muon's updates, which is AdamW's (arXiv 2502.16982, 2.2), so that both take one learning rate
BETAS = (0.9, 0.95)


def axes(name: str, ndim: int) -> MuonDimensionNumbers | None:
    """Which axes of a parameter are a matrix's inputs and outputs, the others being many matrices; None: no matrix of
    a hidden layer (the embedding, the head, the router, the norms), for which Muon is not meant."""
    if ndim < 2 or name.startswith(("embed.", "head.")) or name.endswith(".router"):
        return None
    last = name.rpartition(".")[2]
    if last in ("q", "key_up", "value_up"):  # [H, E, R]
        return MuonDimensionNumbers(reduction_axis=(2,), output_axis=(0, 1))
    if last == "out":  # [D, H, V]
        return MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=(0,))
    return MuonDimensionNumbers(reduction_axis=(ndim - 1,), output_axis=(ndim - 2,))


def make_optimizer(names: Sequence[str], leaves: Sequence[jax.Array], options: Options) -> optax.GradientTransformation:
    """Of a list of parameters, router biases not among them. Updates are multiplied by the learning rate by the caller.

    Weight decay is for matrices only, the embedding not among them: tied, it is the head's too.
    """
    numbers = [axes(name, leaf.ndim) for name, leaf in zip(names, leaves, strict=True)]
    if options.optimizer == "adamw":
        decayed = [one is not None for one in numbers]
        return optax.adamw(1.0, *BETAS, weight_decay=options.weight_decay, mask=decayed)
    if options.optimizer != "muon":
        raise ConfigError(f"--optimizer: got {options.optimizer!r}, allowed: {', '.join(OPTIMIZERS)}")
    return muon(
        1.0,
        weight_decay=options.weight_decay,
        adam_b1=BETAS[0],
        adam_b2=BETAS[1],
        muon_weight_dimension_numbers=numbers,
        consistent_rms=RMS,
    )


def moved_bias(bias_X: jax.Array, load_X: jax.Array, rate: jax.Array) -> jax.Array:
    """Up where an expert was chosen less often than the mean, else down (arXiv 2412.19437, 2.1.2)."""
    return bias_X + rate * jnp.sign(load_X.mean() - load_X)
