"""From logits to tokens on the device: masks, penalties, filters, the draw, and logprobs; float32 throughout.

Parts that no row of the step needs are skipped at run time by the step's flags (`lax.cond`), so that one program a
bucket serves whatever the requests ask for. On a GPU the host waits for the device at each such branch that XLA cannot
put into a command buffer; `sample_plain` has none of them, for the steps that need nothing but a draw. The filters
and the draw are the op `sampling`; where the vocabulary is cut over devices (`Vocab`), each works on its own columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import FLAG_FILTER, FLAG_LOGPROBS, FLAG_MASK, FLAG_PENALTY, FLAG_RANDOM
from jaxserve.runtime import state as st
from jaxserve.runtime.state import SlotTables, unpack_bits
from jaxserve.runtime.vocab import Vocab
from pallas_kernels.device import Device
from pallas_kernels.sampling import contract as sampling
from pallas_kernels.sampling import xla as sampling_xla

GREEDY_BELOW = 1e-5  # temperatures under it are greedy


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of one token a row under the raw logits, and of the L best ones."""

    chosen_Q: jax.Array  # float32
    rank_Q: jax.Array  # int32, 1 for the most likely
    top_id_QL: jax.Array  # int32
    top_QL: jax.Array  # float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step samples."""

    token_bad_2Q: jax.Array  # int32 [2, Q]: tokens; and 1 where the row's logits held NaN
    scores: Scores | None  # zeros unless FLAG_LOGPROBS; None from `sample_plain`


def sample(
    raw_QV: jax.Array,
    slot_Q: jax.Array,
    position_Q: jax.Array,
    slots: SlotTables,
    flags: jax.Array,
    *,
    vocab: Vocab,
    vocab_size: int,
    num_top: int,
    device: Device,
) -> tuple[SlotTables, Sampled]:
    """Draw one token a row and write it into the slots' history.

    raw_QV: float32 logits, this device's columns. position_Q: int32, the absolute position that the drawn token will
    have. flags: int32 []. Rows of padding name slot S. The same seed and position give the same random numbers whatever
    else is in the batch.
    """
    raw_QV, bad_Q = checked(raw_QV, vocab, vocab_size)
    real_QI, integer_QI = slots.real_SI[slot_Q], slots.integer_SI[slot_Q]

    def when(flag: int, change: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
        return lax.cond((flags & flag) != 0, change, lambda same: same, value)

    logits_QV = when(FLAG_MASK, lambda x: mask(x, slot_Q, position_Q, slots, vocab), raw_QV)
    logits_QV = when(FLAG_PENALTY, lambda x: penalise(x, slot_Q, slots, vocab), logits_QV)
    greedy_Q = vocab.argmax(logits_QV)

    def random(filters: Filters | None) -> Callable[[], jax.Array]:
        return lambda: draw(logits_QV, greedy_Q, real_QI, slots.seed_SI[slot_Q], position_Q, filters, vocab, device)

    filters = Filters(integer_QI[:, st.TOP_K], real_QI[:, st.TOP_P], real_QI[:, st.MIN_P])
    what = jnp.where((flags & FLAG_RANDOM) == 0, 0, jnp.where((flags & FLAG_FILTER) == 0, 1, 2))
    token_Q = lax.switch(what, (lambda: greedy_Q, random(None), random(filters)))
    token_Q = jnp.minimum(token_Q, vocab_size - 1)  # an all-NaN row's argmax may point anywhere
    no_scores = jax.tree.map(
        lambda like: jnp.zeros(like.shape, like.dtype), jax.eval_shape(lambda: score(raw_QV, token_Q, vocab, num_top))
    )
    scores = lax.cond((flags & FLAG_LOGPROBS) != 0, lambda: score(raw_QV, token_Q, vocab, num_top), lambda: no_scores)
    return remember(slots, slot_Q, token_Q), Sampled(jnp.stack((token_Q, bad_Q.astype(jnp.int32))), scores)


def sample_plain(
    raw_QV: jax.Array,
    slot_Q: jax.Array,
    position_Q: jax.Array,
    slots: SlotTables,
    *,
    vocab: Vocab,
    vocab_size: int,
    device: Device,
) -> tuple[SlotTables, Sampled]:
    """`sample` for steps whose flags are none but FLAG_RANDOM: the same tokens, without a branch."""
    raw_QV, bad_Q = checked(raw_QV, vocab, vocab_size)
    real_QI = slots.real_SI[slot_Q]
    greedy_Q = vocab.argmax(raw_QV)
    token_Q = draw(raw_QV, greedy_Q, real_QI, slots.seed_SI[slot_Q], position_Q, None, vocab, device)
    token_Q = jnp.minimum(token_Q, vocab_size - 1)
    return remember(slots, slot_Q, token_Q), Sampled(jnp.stack((token_Q, bad_Q.astype(jnp.int32))), None)


def checked(raw_QV: jax.Array, vocab: Vocab, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """The logits with the head's padding rows, which cannot be decoded, at -inf; and bool [Q], where there is a NaN."""
    raw_QV = jnp.where(vocab.ids() < vocab_size, raw_QV, -jnp.inf)
    return raw_QV, jnp.isnan(vocab.max(raw_QV.max(axis=1)))


@dataclass(frozen=True, slots=True)
class Filters:
    """What each row's token is drawn from; the values that let all pass: 0, 1.0 and 0.0."""

    top_k_Q: jax.Array  # int32
    top_p_Q: jax.Array  # float32
    min_p_Q: jax.Array  # float32


def draw(
    logits_QV: jax.Array,
    greedy_Q: jax.Array,
    real_QI: jax.Array,
    seed_QI: jax.Array,
    position_Q: jax.Array,
    filters: Filters | None,
    vocab: Vocab,
    device: Device,
) -> jax.Array:
    """A draw from softmax(logits / temperature) a row, of what its filters leave; greedy rows take `greedy_Q`.

    One uniform number a row, a function of its seed and position, is looked up in the running sum of the weights.
    """
    temperature_Q = real_QI[:, st.TEMPERATURE]
    is_greedy_Q = temperature_Q < GREEDY_BELOW
    temperature_Q = jnp.where(is_greedy_Q, 1.0, temperature_Q)
    uniform_Q = jax.vmap(uniform)(seed_QI, position_Q)
    if vocab.axes:
        drawn_Q = draw_cut(logits_QV / temperature_Q[:, None], uniform_Q, filters, vocab)
    else:
        numbers = (None, None, None) if filters is None else (filters.top_k_Q, filters.top_p_Q, filters.min_p_Q)
        drawn_Q, _ = sampling.sample(logits_QV, uniform_Q, *numbers, temperature_Q, device=device)
    return jnp.where(is_greedy_Q, greedy_Q, drawn_Q)


def draw_cut(scaled_QV: jax.Array, uniform_Q: jax.Array, filters: Filters | None, vocab: Vocab) -> jax.Array:
    """The same draw where each device has a part of every row."""
    if filters is not None:
        scaled_QV = keep_likely(scaled_QV, filters, vocab)
    peak_Q = vocab.max(scaled_QV.max(axis=1))
    return vocab.draw(jnp.exp(scaled_QV - jnp.where(jnp.isfinite(peak_Q), peak_Q, 0.0)[:, None]), uniform_Q)


def mask(logits_QV: jax.Array, slot_Q: jax.Array, position_Q: jax.Array, slots: SlotTables, vocab: Vocab) -> jax.Array:
    """allowed and banned ids, bad words, stop ids before min_tokens, then logit_bias."""
    row_Q = jnp.arange(logits_QV.shape[0])[:, None]
    flag_Q = slots.integer_SI[slot_Q, st.ROW_FLAGS]
    free_Q1 = ((flag_Q & st.ROW_ALLOWED) == 0)[:, None]
    allowed_QV = free_Q1 | vocab.cut(unpack_bits(slots.allowed_SW[slot_Q], vocab.width))
    prefix_QBI, recent_QI = slots.bad_prefix_SI[slot_Q], slots.recent_SI[slot_Q]
    bad_QB = jnp.all((prefix_QBI == -1) | (prefix_QBI == recent_QI[:, None]), axis=2)
    bad_QB &= ((flag_Q & st.ROW_BAD) != 0)[:, None]
    bad_id_QB = vocab.place(jnp.where(bad_QB, slots.bad_last_SI[slot_Q], st.NO_TOKEN))
    allowed_QV = allowed_QV.at[row_Q, bad_id_QB].set(False, mode="drop")
    early_Q1 = (position_Q < slots.integer_SI[slot_Q, st.MIN_POSITION])[:, None]
    stops_QI = vocab.place(jnp.where(early_Q1, slots.masked_SI[slot_Q], st.NO_TOKEN))
    allowed_QV = allowed_QV.at[row_Q, stops_QI].set(False, mode="drop")
    biased_Q1 = ((flag_Q & st.ROW_BIAS) != 0)[:, None]
    bias_id_QI = vocab.place(jnp.where(biased_Q1, slots.bias_id_SI[slot_Q], st.NO_TOKEN))
    biased_QV = logits_QV.at[row_Q, bias_id_QI].add(slots.bias_SI[slot_Q], mode="drop")
    return jnp.where(allowed_QV, biased_QV, -jnp.inf)


def penalise(logits_QV: jax.Array, slot_Q: jax.Array, slots: SlotTables, vocab: Vocab) -> jax.Array:
    """Repetition (over prompt and output, arXiv 1909.05858), then presence and frequency (over the output)."""
    real_QI = slots.real_SI[slot_Q]
    count_QV = vocab.cut(slots.count_SV[slot_Q])
    seen_QV = vocab.cut(unpack_bits(slots.prompt_SW[slot_Q], vocab.width)) | (count_QV > 0)
    repetition_Q1 = real_QI[:, st.REPETITION, None]
    repeated_QV = jnp.where(logits_QV > 0, logits_QV / repetition_Q1, logits_QV * repetition_Q1)
    out_QV = jnp.where(seen_QV, repeated_QV, logits_QV)
    out_QV -= real_QI[:, st.PRESENCE, None] * (count_QV > 0) + real_QI[:, st.FREQUENCY, None] * count_QV
    penalised_Q1 = ((slots.integer_SI[slot_Q, st.ROW_FLAGS] & st.ROW_PENALTY) != 0)[:, None]
    return jnp.where(penalised_Q1, out_QV, logits_QV)


def keep_likely(scaled_QV: jax.Array, filters: Filters, vocab: Vocab) -> jax.Array:
    """-inf for what top_k, then top_p over what is left, and min_p leave out. Ties with a threshold stay in."""
    peak_Q1 = vocab.max(scaled_QV.max(axis=1))[:, None]
    numbers = (filters.top_k_Q, filters.top_p_Q, filters.min_p_Q, jnp.ones_like(filters.top_p_Q))
    kept_QV = sampling_xla.kept(scaled_QV, jnp.exp(scaled_QV - peak_Q1), peak_Q1, *numbers, vocab)
    return jnp.where(kept_QV, scaled_QV, -jnp.inf)


def uniform(seed_I: jax.Array, position: jax.Array) -> jax.Array:
    """A number in [0, 1), float32, a function of the 64-bit seed and the position alone."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_I, impl="threefry2x32"), position)
    return jax.random.uniform(key, (), jnp.float32)


def score(raw_QV: jax.Array, token_Q: jax.Array, vocab: Vocab, num_top: int) -> Scores:
    """Log-softmax of the raw logits at the tokens and at the `num_top` best ids."""
    normaliser_Q = vocab.logsumexp(raw_QV)
    chosen_Q = vocab.at(raw_QV, token_Q)
    rank_Q = 1 + vocab.sum(jnp.sum(raw_QV > chosen_Q[:, None], axis=1, dtype=jnp.int32))
    top_QL, top_id_QL = vocab.top_k(raw_QV, num_top)
    return Scores(chosen_Q - normaliser_Q, rank_Q, top_id_QL, top_QL - normaliser_Q[:, None])


def remember(slots: SlotTables, slot_Q: jax.Array, token_Q: jax.Array) -> SlotTables:
    """The drawn tokens become the slots' last ones and are counted."""
    recent_QI = jnp.concatenate((slots.recent_SI[slot_Q, 1:], token_Q[:, None]), axis=1)
    return dataclasses.replace(
        slots,
        last_token_S=slots.last_token_S.at[slot_Q].set(token_Q),
        recent_SI=slots.recent_SI.at[slot_Q].set(recent_QI),
        count_SV=slots.count_SV.at[slot_Q, token_Q].add(1),
    )
