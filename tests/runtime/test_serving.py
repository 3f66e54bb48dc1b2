"""The real engine over the real runner, a tiny model on the CPU, against a plain numpy model.

The cache starts full of NaN, so any stale or unwritten row that mattered would show.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.request import Finish
from tests.fakes.tiny import VOCAB, TinyServer, greedy, reference_logits


@pytest.fixture(scope="module")
def weights(tiny: TinyServer) -> dict[str, np.ndarray]:
    return tiny.weights()


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, tokens).tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits[..., :VOCAB] - logits[..., :VOCAB].max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
def test_greedy_ids_equal_the_reference(tiny: TinyServer, weights: dict[str, np.ndarray], tokens: int) -> None:
    ids = prompt(tokens, tokens)
    (result,) = tiny.run([tiny.request(ids, 12)])
    assert result.token_ids == greedy(tiny.spec, weights, ids, 12)
    assert result.finish is Finish.LENGTH


def test_mixed_lengths_in_one_batch_equal_their_solo_runs(tiny: TinyServer) -> None:
    before = tiny.runner.compilations_after_warmup
    sizes = [5, 33, 70, 1, 16, 100, 48]
    prompts = [prompt(100 + size, size) for size in sizes]
    alone = [tiny.run([tiny.request(ids, 10)])[0].token_ids for ids in prompts]
    together = tiny.run([tiny.request(ids, 10) for ids in prompts])
    assert [result.token_ids for result in together] == alone
    assert tiny.runner.compilations_after_warmup == before


def test_logprobs_of_every_position_equal_the_reference(tiny: TinyServer, weights: dict[str, np.ndarray]) -> None:
    ids = prompt(7, 90)
    (result,) = tiny.run([tiny.request(ids, 6, logprobs=4, prompt_logprobs=3)])
    want = log_softmax(reference_logits(tiny.spec, weights, ids + result.token_ids))
    for i, (token, position) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        row = want[len(ids) - 1 + i]
        assert position.chosen[0] == pytest.approx(row[token], abs=2e-4)
        assert position.top_ids[0, :4].tolist() == np.argsort(-row)[:4].tolist()
        assert position.rank[0] == 1
    chosen = np.concatenate([part.chosen for part in result.prompt_logprobs])
    tops = np.concatenate([part.top_ids for part in result.prompt_logprobs])
    rows = np.arange(len(ids) - 1)
    assert np.allclose(chosen, want[rows, ids[1:]], atol=2e-4)
    assert np.array_equal(tops[:, 0], want[: len(ids) - 1].argmax(-1))


def test_b061_one_logprob_a_token_with_a_chunked_prompt(tiny: TinyServer) -> None:
    ids = prompt(8, 150)
    for max_tokens in (1, 3):
        (result,) = tiny.run([tiny.request(ids, max_tokens, logprobs=1)])
        assert len(result.logprobs) == len(result.token_ids) == max_tokens


def test_seeded_sampling_is_the_same_alone_and_in_company(tiny: TinyServer) -> None:
    ids = prompt(9, 20)
    (alone,) = tiny.run([tiny.request(ids, 20, temperature=1.0, top_p=0.9, seed=5)])
    company = [tiny.request(prompt(i, 30 + i), 25, temperature=1.3, seed=i) for i in range(3)]
    together = tiny.run([*company, tiny.request(ids, 20, temperature=1.0, top_p=0.9, seed=5)])
    assert together[-1].token_ids == alone.token_ids
    (other,) = tiny.run([tiny.request(ids, 20, temperature=1.0, top_p=0.9, seed=(1 << 32) + 5)])
    assert other.token_ids != alone.token_ids


def test_b022_b034_stop_ids_masks_and_padding_rows(tiny: TinyServer, weights: dict[str, np.ndarray]) -> None:
    ids = prompt(10, 12)
    free = greedy(tiny.spec, weights, ids, 8)
    stop = free[2]
    (result,) = tiny.run([tiny.request(ids, 8, stop_token_ids=(stop,))])
    assert (result.token_ids, result.finish) == (free[: free.index(stop) + 1], Finish.STOP)
    fields = dict(stop_token_ids=(stop,), masked_until_min=(stop,), min_tokens=6)
    (held,) = tiny.run([tiny.request(ids, 8, **fields)])
    assert stop not in held.token_ids[:6] and len(held.token_ids) >= 6
    (hot,) = tiny.run([tiny.request(ids, 60, temperature=50.0, seed=1)])
    assert max(hot.token_ids) < VOCAB


def test_penalties_and_bans_do_not_touch_the_neighbours(tiny: TinyServer, weights: dict[str, np.ndarray]) -> None:
    ids = prompt(11, 25)
    free = greedy(tiny.spec, weights, ids, 8)
    plain, banned, penalised = tiny.run(
        [
            tiny.request(ids, 8),
            tiny.request(ids, 8, banned_token_ids=tuple(set(free))),
            tiny.request(ids, 8, repetition_penalty=20.0),
        ]
    )
    assert plain.token_ids == free
    assert not set(banned.token_ids) & set(free)
    assert len(set(penalised.token_ids)) == 8


def test_b011_preempted_sequences_go_on_as_if_nothing_had_happened(tiny: TinyServer) -> None:
    tight = TinyServer(num_pages=6)
    prompts = [prompt(20, 32), prompt(21, 32)]
    fields = dict(max_tokens=48, temperature=0.9, seed=3, repetition_penalty=1.2)
    want = [result.token_ids for result in tiny.run([tiny.request(ids, **fields) for ids in prompts])]
    got = tight.run([tight.request(ids, **fields) for ids in prompts])
    assert [len(result.token_ids) for result in got] == [48, 48]
    assert [result.token_ids for result in got] == want
    tight.runner.close()


def test_b139_no_compilation_after_warmup_over_mixed_requests(tiny: TinyServer) -> None:
    rng = np.random.default_rng(0)
    requests = []
    for i in range(60):
        fields = {
            "temperature": float(rng.choice([0.0, 0.7])),
            "top_k": int(rng.choice([0, 5])),
            "top_p": float(rng.choice([1.0, 0.8])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "logprobs": [None, 0, 5][i % 3],
            "prompt_logprobs": [None, None, 2][i % 3],
            "seed": i,
        }
        requests.append(tiny.request(prompt(i, int(rng.integers(1, 150))), int(rng.integers(1, 12)), **fields))
    before = tiny.runner.compilations_after_warmup  # other tests of this process compile servers of their own
    results = tiny.run(requests)
    assert all(result.finish is Finish.LENGTH for result in results)
    assert tiny.runner.compilations_after_warmup == before


def test_the_counter_sees_a_compilation(tiny: TinyServer) -> None:
    before = tiny.runner.compilations_after_warmup
    jax.jit(lambda x: x * 3 + 1)(np.arange(7)).block_until_ready()
    assert tiny.runner.compilations_after_warmup == before + 1
