"""The compiled steps of training: (state, all rows, which of them, rates) -> (state, what was measured); validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from demo_model.train.loss import Losses, losses
from demo_model.train.optimizer import make_optimizer, moved_bias
from demo_model.train.options import Options
from demo_model.train.schedule import Rates
from demo_model.train.state import TrainState, compute_leaves, trained
from jaxserve.models.decoder import SplitDecoder


class Measured(NamedTuple):
    """Of one step, on the device."""

    losses: Losses
    gradient_norm: jax.Array
    load_YX: jax.Array  # float32, tokens of each expert of each MoE layer; empty where no layer has a bias


Step = Callable[[TrainState, jax.Array, jax.Array, jax.Array, Rates], tuple[TrainState, Measured]]
Validate = Callable[[list[jax.Array], jax.Array, jax.Array], Losses]


class Trainer:
    """The compiled functions of one model. The optimizer sees the weights without the router biases."""

    def __init__(self, split: SplitDecoder, options: Options) -> None:
        self.split, self.options = split, options
        self.bos_token_id = split.spec.bos_token_id
        self.trained = trained(split.names)
        self.biases = sorted(set(range(len(split.names))) - set(self.trained))
        names = [split.names[i] for i in self.trained]
        self.optimizer = make_optimizer(names, [split.leaves[i] for i in self.trained], options)
        self.step: Step = jax.jit(self._step, donate_argnums=0)
        self.validate: Validate = jax.jit(self._validate)

    def start(self, weights: list[jax.Array]) -> TrainState:
        """The state that training begins with."""
        return TrainState(weights, self.optimizer.init([weights[i] for i in self.trained]))

    def _losses(self, leaves: list[jax.Array], token_IC: jax.Array, count_IC: jax.Array) -> Losses:
        return losses(self.split.merge(leaves), token_IC.astype(jnp.int32), count_IC, self.bos_token_id)

    def _validate(self, weights: list[jax.Array], token_IC: jax.Array, count_IC: jax.Array) -> Losses:
        return self._losses(compute_leaves(self.split, weights), token_IC, count_IC)

    def _step(
        self, state: TrainState, token_NC: jax.Array, count_NC: jax.Array, row_PI: jax.Array, rates: Rates
    ) -> tuple[TrainState, Measured]:
        """The batch is the P parts of I rows each, of all N rows, that `row_PI` names."""
        leaves = compute_leaves(self.split, state.weights)

        def loss(leaves: list[jax.Array], row_I: jax.Array) -> tuple[jax.Array, Losses]:
            found = self._losses(leaves, token_NC[row_I], count_NC[row_I])
            return found.total(rates.mtp_weight), found

        def part(
            total: tuple[list[jax.Array], Losses], row_I: jax.Array
        ) -> tuple[tuple[list[jax.Array], Losses], None]:
            gradients, found = jax.grad(loss, has_aux=True)(leaves, row_I)
            return jax.tree.map(jnp.add, total, ([g.astype(jnp.float32) for g in gradients], found)), None

        none = ([jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves], Losses(*[jnp.zeros(())] * 6))
        (gradients, found), _ = jax.lax.scan(part, none, row_PI)
        weights, moments, norm = self._moved(state, gradients, row_PI.shape[0], rates)
        loads = [gradients[i] for i in self.biases]
        return TrainState(weights, moments), Measured(found, norm, jnp.stack(loads) if loads else jnp.zeros((0, 0)))

    def _moved(
        self, state: TrainState, gradients: list[jax.Array], parts: int, rates: Rates
    ) -> tuple[list[jax.Array], optax.OptState, jax.Array]:
        """New weights and moments, and the norm of the gradient before it was clipped."""
        mean = [gradients[i] / parts for i in self.trained]
        norm = optax.tree.norm(mean)
        clipped = [g * jnp.minimum(1.0, self.options.clip_norm / (norm + 1e-6)) for g in mean]
        updates, moments = self.optimizer.update(clipped, state.moments, [state.weights[i] for i in self.trained])
        weights = list(state.weights)
        for i, update in zip(self.trained, updates, strict=True):
            weights[i] = weights[i] + rates.learning * update
        for i in self.biases:
            weights[i] = moved_bias(weights[i], gradients[i], rates.bias)
        return weights, moments, norm
