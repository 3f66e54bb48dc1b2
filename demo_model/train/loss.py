"""Takes rows of token ids; gives the losses on them: the next token's, and the one after it by the MTP layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers.rope import angles
from jaxserve.layers.rows import Rows
from jaxserve.models.decoder import Decoder


class Losses(NamedTuple):
    """Sums over the counted tokens, float32 scalars: cross entropy in nats, hits of the most likely token, tokens."""

    main: jax.Array
    main_hits: jax.Array
    main_tokens: jax.Array
    mtp: jax.Array
    mtp_hits: jax.Array
    mtp_tokens: jax.Array

    def total(self, mtp_weight: jax.Array | float) -> jax.Array:
        """What is minimised: the means' weighted sum (DeepSeek-V3, arXiv 2412.19437, eq. 24 and 25, one MTP layer)."""
        return self.main / jnp.maximum(self.main_tokens, 1) + mtp_weight * self.mtp / jnp.maximum(self.mtp_tokens, 1)


def hidden_states(model: Decoder, token_IC: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array | None]:
    """Normed outputs [T, D] at each token, of the decoder and (None without one) of its first MTP layer.

    The MTP layer's input at token t is its projection of [norm(embedding of token t+1) ; norm(the decoder's output at
    t)] (arXiv 2412.19437, eq. 21, in the order of the published weights), its output predicts token t+2 through the
    decoder's own head. The last token of a row is followed by its first: `losses` does not count what comes of it.
    """
    position_T = rows.position_T()
    hidden_TD, _ = model(token_IC.reshape(-1), position_T, [()] * model.spec.num_layers, rows)
    if not model.mtp:
        return hidden_TD, None
    next_TD = model.embed.look_up(jnp.roll(token_IC, -1, axis=1).reshape(-1))
    mtp_TD, _ = model.mtp[0](hidden_TD, next_TD, angles(model.spec.attention.rope, position_T), (), rows)
    return hidden_TD, mtp_TD


def losses(model: Decoder, token_IC: jax.Array, count_IC: jax.Array, bos_token_id: int) -> Losses:
    """Of int32 tokens [I, C]; `count_IC` says whether a token counts as a target. Documents begin at their BOS, see
    nothing of each other, and no token predicts one of another document."""
    rows = Rows.of(token_IC, bos_token_id)
    hidden_TD, mtp_TD = hidden_states(model, token_IC, rows)
    main = scored(model, hidden_TD, token_IC, count_IC, rows, ahead=1)
    mtp = (jnp.zeros(()),) * 3 if mtp_TD is None else scored(model, mtp_TD, token_IC, count_IC, rows, ahead=2)
    return Losses(*main, *mtp)


def scored(
    model: Decoder, hidden_TD: jax.Array, token_IC: jax.Array, count_IC: jax.Array, rows: Rows, ahead: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of cross entropy and of hits over the tokens `ahead` of each hidden state, and how many were counted."""
    target_T = jnp.roll(token_IC, -ahead, axis=1).reshape(-1)
    index_C, document_IC = jnp.arange(token_IC.shape[1]), rows.document_IC
    same_IC = (jnp.roll(document_IC, -ahead, axis=1) == document_IC) & (index_C < token_IC.shape[1] - ahead)
    weight_T = (same_IC & (jnp.roll(count_IC, -ahead, axis=1) != 0)).reshape(-1).astype(jnp.float32)
    logits_TV = model.logits(hidden_TD)
    chosen_T = jnp.take_along_axis(logits_TV, target_T[:, None], axis=1, mode="clip")[:, 0]
    nats_T = jax.nn.logsumexp(logits_TV, axis=1) - chosen_T
    hit_T = jnp.argmax(logits_TV, axis=1) == target_T
    return (nats_T * weight_T).sum(), (hit_T * weight_T).sum(), weight_T.sum()
