"""Sampling on the device against plain numpy, and its promises: isolation of rows, seeds, masks, counts."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.batch import (
    FLAG_FILTER,
    FLAG_LOGPROBS,
    FLAG_MASK,
    FLAG_PENALTY,
    FLAG_RANDOM,
    Install,
    Shape,
)
from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.rope import RopeSpec
from jaxserve.mesh import make_mesh, sharding
from jaxserve.models.spec import ModelSpec
from jaxserve.runtime.sample import sample, sample_plain
from jaxserve.runtime.state import (
    SlotTables,
    install_plain,
    install_wide,
    make_state,
    plain_rows,
    row_flags,
    state_shapes,
    wide_row,
)
from jaxserve.runtime.vocab import Vocab
from pallas_kernels.device import Device
from pallas_kernels.sampling.xla import largest_threshold, ordered_bits

WIDTH, VOCAB, SLOTS, TOP = 128, 100, 4, 5
CPU = Device("cpu")
SPEC = ModelSpec(
    hidden_size=8,
    num_layers=1,
    vocab_size=WIDTH,
    rms_eps=1e-6,
    tie_embeddings=True,
    max_len=64,
    attention=GqaSpec(1, 1, 8, RopeSpec(1e4, 8)),
    mlp_width=8,
    eos_token_ids=(),
    bos_token_id=None,
    dtype="float32",
)
SHAPE = Shape(SLOTS, 4, 16, 4, 2, VOCAB, TOP, 64)

NEUTRAL = dict(
    token_ids=np.array([1, 2], np.int32),
    num_prompt_tokens=2,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    min_position=0,
    masked_until_min=(),
    logit_bias=(),
    allowed_token_ids=None,
    banned_token_ids=(),
    bad_sequences=(),
)


def install(slot: int, **changes: object) -> Install:
    return Install(slot=slot, **(NEUTRAL | changes))


@pytest.fixture
def slots() -> SlotTables:
    return make_state(state_shapes(SPEC, SHAPE, jnp.float32, make_mesh(jax.devices()))).slots


def filled(slots: SlotTables, *installs: Install) -> SlotTables:
    slots = install_plain(slots, jnp.asarray(plain_rows(list(installs), SHAPE)))
    for one in installs:
        if row_flags(one):
            slots = install_wide(slots, wide_row(one, SHAPE, WIDTH))
    return slots


def sampler(vocab: Vocab):
    """The step's sampler, jitted; over a vocabulary that is cut, on as many devices."""
    function = partial(sample, vocab=vocab, vocab_size=VOCAB, num_top=TOP, device=CPU)
    if vocab.shards == 1:
        return jax.jit(function)
    mesh, everywhere = make_mesh(jax.devices(), tensor=vocab.shards), PartitionSpec()
    in_specs = (PartitionSpec(None, "tensor"), *[everywhere] * 4)
    cut = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=everywhere, check_vma=False))
    return lambda *arrays: cut(*jax.device_put(arrays, sharding(mesh)))


SAMPLERS = {shards: sampler(Vocab(WIDTH, ("tensor",) if shards > 1 else (), shards)) for shards in (1, 4)}
run = SAMPLERS[1]


@pytest.fixture(autouse=True, params=SAMPLERS, ids=lambda shards: f"vocabulary in {shards}")
def on_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with the whole vocabulary on one device, and with it cut over four."""
    monkeypatch.setattr(sys.modules[__name__], "run", SAMPLERS[request.param])


ALL = FLAG_FILTER | FLAG_PENALTY | FLAG_MASK | FLAG_LOGPROBS | FLAG_RANDOM


def draw(slots: SlotTables, raw: np.ndarray, rows: list[int], positions: list[int], flags: int = ALL):
    slots, out = run(jnp.asarray(raw, jnp.float32), jnp.asarray(rows), jnp.asarray(positions), slots, jnp.int32(flags))
    return slots, np.asarray(out.token_bad_2Q[0]), np.asarray(out.token_bad_2Q[1]), jax.tree.map(np.asarray, out.scores)


def logits(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32) * 3


def allowed_by_filters(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The plain reading: sort, cut to k, renormalise, smallest set that reaches p; min_p against the best."""
    keep = np.zeros(len(x), bool)
    order = np.argsort(-x, kind="stable")
    order = order[: top_k or len(x)]
    p = np.exp(x[order] - x.max())
    p /= p.sum()
    enough = np.searchsorted(np.cumsum(p), top_p * (1 - 1e-6)) + 1
    keep[order[:enough] if top_p < 1 else order] = True
    return keep & (np.exp(x - x.max()) >= min_p)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0), (5, 1, 0), (1, 1, 0), (7, 0.6, 0), (0, 1, 0.2), (20, 0.8, 0.05), (0, 1e-6, 0)],
)
def test_filters_draw_from_exactly_the_allowed_set(slots: SlotTables, top_k: int, top_p: float, min_p: float) -> None:
    raw = logits(1)
    want = allowed_by_filters(raw[0, :VOCAB], top_k, top_p, min_p)
    seen = np.zeros(VOCAB, bool)
    slots = filled(slots, install(0, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=7))
    for position in range(0, 4000, 50):
        tokens = draw(slots, np.repeat(raw, 50, 0), [0] * 50, list(range(position, position + 50)))[1]
        seen[tokens] = True
    assert not (seen & ~want).any()
    likely = np.exp(raw[0, :VOCAB] - raw[0, :VOCAB].max())
    assert seen[want & (likely > 0.02)].all()


def test_frequencies_follow_the_softmax(slots: SlotTables) -> None:
    raw = logits(2) / 3
    slots = filled(slots, install(0, temperature=0.7, seed=3))
    counts = np.zeros(VOCAB)
    for position in range(0, 20000, 200):
        tokens = draw(slots, np.repeat(raw, 200, 0), [0] * 200, list(range(position, position + 200)), FLAG_RANDOM)[1]
        counts += np.bincount(tokens, minlength=VOCAB)
    p = np.exp(raw[0, :VOCAB] / 0.7)
    p /= p.sum()
    assert np.abs(counts / counts.sum() - p).sum() < 0.05


def test_largest_threshold_is_exact_for_every_k() -> None:
    x = jnp.asarray(np.concatenate((logits(3)[0], [0.0, -0.0, -np.inf, 1e-30, -1e-30])).astype(np.float32))
    order = ordered_bits(x)
    assert np.array_equal(np.argsort(np.asarray(order), kind="stable"), np.argsort(np.asarray(x), kind="stable"))
    assert order[128] == order[129]
    for k in (1, 2, 17, len(x)):
        found = largest_threshold(lambda t, k=k: jnp.sum(order[None] >= t[:, None], axis=1) >= k, order.max()[None])
        assert int(jnp.sum(order >= found[0])) == k


def test_a_rows_draw_does_not_depend_on_its_neighbours(slots: SlotTables) -> None:
    raw = logits(4, 3)
    slots = filled(
        slots, install(0, temperature=0.8, top_p=0.9, seed=3), install(1), install(2, temperature=1.3, top_k=4, seed=9)
    )
    together = draw(slots, raw, [0, 1, 2], [11, 12, 13])[1]
    shuffled = draw(slots, raw[[2, 0, 1]], [2, 0, 1], [13, 11, 12])[1]
    padded = draw(slots, np.concatenate((raw, raw)), [0, 1, 2, SLOTS, SLOTS, SLOTS], [11, 12, 13, 0, 0, 0])[1]
    assert np.array_equal(together, shuffled[[1, 2, 0]])
    assert np.array_equal(together, padded[:3])
    for row in range(3):
        assert draw(slots, raw[[row]], [row], [11 + row])[1] == together[row]


def test_a_vocabulary_that_is_cut_draws_the_same_tokens(slots: SlotTables) -> None:
    raw = jnp.asarray(logits(12, 2))
    slots = filled(
        slots, install(0, temperature=0.8, top_p=0.9, seed=3), install(1, temperature=1.3, top_k=20, min_p=0.01, seed=5)
    )
    arguments = (jnp.repeat(raw, 50, axis=0), jnp.repeat(jnp.arange(2), 50), jnp.arange(100), slots, jnp.int32(ALL))
    whole, cut = (np.asarray(sampler(*arguments)[1].token_bad_2Q) for sampler in SAMPLERS.values())
    assert np.array_equal(whole, cut) and len(set(whole[0])) > 10


def test_b026_greedy_row_with_masks_beside_a_random_row(slots: SlotTables) -> None:
    raw = logits(5, 2)
    raw[0, 7], raw[0, 9], raw[0, 42] = 50, 40, 30  # 7 is banned, 9 is the eos id masked by min_tokens
    masked = install(0, banned_token_ids=(7,), min_position=5, masked_until_min=(9,))
    random = install(1, temperature=0.8, top_p=0.9, seed=3)
    slots = filled(slots, masked, random)
    _, tokens, bad, _ = draw(slots, raw, [0, 1], [4, 4])
    assert tokens[0] == 42 and not bad.any()
    assert draw(slots, raw[:1], [0], [4])[1] == 42
    assert draw(slots, raw[1:], [1], [4])[1] == tokens[1]
    assert draw(slots, raw[:1], [0], [5])[1] == 9  # min_tokens is over
    biased = filled(slots, install(0, logit_bias=((7, -1e9),)))
    assert draw(biased, raw[:1], [0], [4])[1] == 9


def test_b028_seeds_keep_all_64_bits(slots: SlotTables) -> None:
    raw = np.zeros((32, WIDTH), np.float32)
    seeds = (5, (1 << 32) + 5, 0, (1 << 64) - 1, 1 << 63)
    runs = set()
    for seed in seeds:
        one = filled(slots, install(0, temperature=1.0, seed=seed))
        runs.add(tuple(draw(one, raw, [0] * 32, list(range(32)))[1].tolist()))
        assert tuple(draw(one, raw, [0] * 32, list(range(32)))[1].tolist()) in runs
    assert len(runs) == len(seeds)


def test_b032_repetition_penalty_changes_the_greedy_choice(slots: SlotTables) -> None:
    raw = np.full((1, WIDTH), -9, np.float32)
    raw[0, 5], raw[0, 6] = 3.0, 2.9
    slots = filled(slots, install(0, repetition_penalty=1.3))
    out = []
    for position in range(2, 7):
        slots, tokens, _, _ = draw(slots, raw, [0], [position])
        out.append(int(tokens[0]))
    assert out == [5, 6, 5, 5, 5]


def test_penalties_count_prompt_and_output_as_vllm_does(slots: SlotTables) -> None:
    raw = np.zeros((1, WIDTH), np.float32)
    raw[0, [1, 3, 4]] = 1.0, 0.9, 0.8  # 1 is in the prompt
    frequency = filled(slots, install(0, frequency_penalty=0.15))
    out = []
    for position in range(2, 6):
        frequency, tokens, _, _ = draw(frequency, raw, [0], [position])
        out.append(int(tokens[0]))
    assert out == [1, 3, 1, 4]  # 1.0 0.9 0.8 -> .85 .9 .8 -> .85 .75 .8 -> .70 .75 .8
    presence = filled(slots, install(0, presence_penalty=0.15))
    _, tokens, _, _ = draw(presence, raw, [0], [2])
    assert tokens[0] == 1  # the prompt does not count for presence
    resumed = filled(slots, install(0, presence_penalty=0.5, token_ids=np.array([1, 2, 1, 3], np.int32)))
    assert draw(resumed, raw, [0], [4])[1] == 4  # 1 and 3 were generated before the slot was taken again


def test_bad_words_of_several_tokens_ban_only_their_last_token_after_their_first_ones(slots: SlotTables) -> None:
    raw = np.full((1, WIDTH), -5, np.float32)
    raw[0, [10, 11, 12]] = 3, 2, 1
    slots = filled(slots, install(0, bad_sequences=((10, 11), (2, 10, 12))))
    slots, tokens, _, _ = draw(slots, raw, [0], [2])
    assert tokens[0] == 10
    raw[0, 11] = 9
    slots, tokens, _, _ = draw(slots, raw, [0], [3])
    assert tokens[0] == 10  # 11 may not follow 10, and 12 may not follow (2, 10)
    raw[0, 10] = -50
    _, tokens, _, _ = draw(slots, raw, [0], [4])
    assert tokens[0] == 12  # after (10, 10) only 11 is banned


def test_allowed_token_ids_and_masks_do_not_leak_to_a_slots_next_owner(slots: SlotTables) -> None:
    raw = logits(6)
    best = int(raw[0, :VOCAB].argmax())
    limited = filled(slots, install(0, allowed_token_ids=(3, 4)))
    assert draw(limited, raw, [0], [2])[1] in (3, 4)
    assert draw(filled(limited, install(0)), raw, [0], [2])[1] == best


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_b034_padded_vocabulary_rows_are_never_sampled(slots: SlotTables, temperature: float) -> None:
    raw = logits(7)
    raw[0, 110] = 100.0
    slots = filled(slots, install(0, temperature=temperature))
    _, tokens, _, scores = draw(slots, raw, [0], [2])
    assert tokens[0] < VOCAB and (scores.top_id_QL < VOCAB).all()
    assert np.isfinite(scores.top_QL).all() and scores.top_QL.max() < 0


def test_b057_logprobs_are_of_the_raw_logits_finite_and_hold_the_chosen_token(slots: SlotTables) -> None:
    raw = logits(8)
    worst = int(raw[0, :VOCAB].argmin())
    slots = filled(slots, install(0, allowed_token_ids=(worst,), temperature=1.0, top_k=1))
    _, tokens, _, scores = draw(slots, raw, [0], [2])
    reference = raw[0, :VOCAB] - np.log(np.exp(raw[0, :VOCAB]).sum())
    assert tokens[0] == worst and scores.rank_Q[0] == VOCAB
    assert np.allclose(scores.chosen_Q[0], reference[worst], atol=1e-5)
    assert np.allclose(scores.top_QL[0], np.sort(reference)[::-1][:TOP], atol=1e-5)
    assert np.array_equal(scores.top_id_QL[0], np.argsort(-reference)[:TOP])


def test_nan_logits_are_reported_for_their_row_alone(slots: SlotTables) -> None:
    raw = logits(9, 2)
    raw[0, 3] = np.nan
    slots = filled(slots, install(0, temperature=1.0), install(1))
    _, tokens, bad, _ = draw(slots, raw, [0, 1], [2, 2])
    assert bad.tolist() == [1, 0]
    assert 0 <= tokens[0] < VOCAB and tokens[1] == raw[1, :VOCAB].argmax()


def test_skipped_parts_give_what_neutral_parameters_give(slots: SlotTables) -> None:
    raw = logits(10, 2)
    slots = filled(slots, install(0), install(1, temperature=1.0, seed=4))
    assert np.array_equal(draw(slots, raw, [0, 1], [2, 2], ALL)[1], draw(slots, raw, [0, 1], [2, 2], FLAG_RANDOM)[1])


def test_the_plain_form_draws_the_same_tokens(slots: SlotTables) -> None:
    raw = jnp.asarray(logits(11, 3))
    slots = filled(slots, install(0), install(1, temperature=1.0, seed=4), install(2, temperature=0.3, seed=5))
    rows, positions = jnp.arange(3), jnp.array([5, 6, 7])
    full_slots, full = run(raw, rows, positions, slots, jnp.int32(FLAG_RANDOM))
    plain_slots, plain = jax.jit(partial(sample_plain, vocab=Vocab(WIDTH), vocab_size=VOCAB, device=CPU))(
        raw, rows, positions, slots
    )
    assert np.array_equal(full.token_bad_2Q, plain.token_bad_2Q)
    assert all(map(np.array_equal, jax.tree.leaves(full_slots), jax.tree.leaves(plain_slots)))
    assert "conditional" not in jax.jit(partial(sample_plain, vocab=Vocab(WIDTH), vocab_size=VOCAB, device=CPU)).lower(
        raw, rows, positions, slots
    ).as_text("hlo")
