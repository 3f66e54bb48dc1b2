"""Deterministic mode with real numbers, in bfloat16 on the CPU: ids and logprobs to the bit, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.request import TokenRequest
from tests.fakes.tiny import Result, TinyServer

GOLDENS = Path(__file__).parents[1] / "goldens"
MODELS = {
    "MLA and experts": "deepseek_v2_tiny/lite",
    "MLA with low-rank queries": "glm4_moe_lite_tiny/flash-mtp",
    "GQA and experts": "glm4_moe_tiny/qk-norm-mtp",
}
MESHES = {name: (1, 1, 1) for name in MODELS} | {"GQA and experts": (1, 2, 2)}  # two lanes, each of two devices
VOCAB = 128


def server(name: str, deterministic: bool = True, **options: Any) -> TinyServer:
    """In the mode, unless told otherwise."""
    return TinyServer(checkpoint=GOLDENS / name, dtype="bfloat16", deterministic=deterministic, **options)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest) -> Iterator[TinyServer]:
    made = server(MODELS[request.param], mesh=MESHES[request.param])
    yield made
    made.runner.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, tokens).tolist()


def company(tiny: TinyServer, seed: int, count: int) -> tuple[list[TokenRequest], list[int]]:
    """Random requests of all kinds, and the steps at which they come."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        fields: dict[str, Any] = {
            "temperature": float(rng.choice([0.0, 0.8])),
            "top_p": float(rng.choice([1.0, 0.8])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "prompt_logprobs": [None, 1][int(rng.integers(2))],
            "logit_bias": [(), ((9, 2.0), (11, -3.0))][int(rng.integers(2))],
            "banned_token_ids": [(), (5, 6)][int(rng.integers(2))],
            "seed": i,
        }
        ids = prompt(1000 * seed + i, int(rng.integers(1, 90)))
        requests.append(tiny.request(ids, int(rng.integers(1, 16)), **fields))
    return requests, rng.integers(0, 20, count).tolist()


def bits(result: Result) -> tuple[list[int], list[bytes]]:
    """Ids, and every logprob as it was computed."""
    parts = [*result.logprobs, *result.prompt_logprobs]
    assert parts and not result.error
    return result.token_ids, [part.chosen.tobytes() + part.top.tobytes() for part in parts]


def watched(tiny: TinyServer) -> list[TokenRequest]:
    """Greedy, drawn from all, drawn from some, penalised, scored; prompts of less than a chunk and of several."""
    kinds: list[dict] = [
        {},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 8},
        {"repetition_penalty": 1.3},
        {"prompt_logprobs": 4},
    ]
    sizes = (90, 33, 64, 5, 70)
    return [
        tiny.request(prompt(i, tokens), 20, logprobs=4, **fields)
        for i, (fields, tokens) in enumerate(zip(kinds, sizes, strict=True))
    ]


def test_alone_and_in_any_company_are_the_same_to_the_bit(served: TinyServer) -> None:
    alone = [bits(served.run([request])[0]) for request in watched(served)]
    for seed, count in ((1, 1), (2, 3), (3, 8), (4, 12)):
        others, steps = company(served, seed, count)
        mine = watched(served)
        at = np.random.default_rng(seed).integers(0, 20, len(mine)).tolist()
        results = served.run([*mine, *others], at_steps=[*at, *steps])
        assert [bits(result) for result in results[: len(mine)]] == alone, f"company {seed}"
    assert served.runner.compilations_after_warmup == 0


@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)
def test_b066_a_preempted_sequence_goes_on_to_the_bit(name: str) -> None:
    """A pool that two of the sequences cannot share."""
    tight = server(name, num_pages=9)
    mine: list[dict[str, Any]] = [
        dict(max_tokens=45, temperature=temperature, seed=3, logprobs=4) for temperature in (0.0, 0.9)
    ]
    prompts = [prompt(20, 60), prompt(21, 50)]
    alone = [bits(tight.run([tight.request(ids, **fields)])[0]) for ids, fields in zip(prompts, mine, strict=True)]
    assert tight.stats.preemptions_total == 0
    pairs = zip(prompts, mine, strict=True)
    together = tight.run([tight.request(ids, **fields) for ids, fields in pairs], at_steps=[0, 3])
    assert tight.stats.preemptions_total > 0
    assert [bits(result) for result in together] == alone
    tight.runner.close()


@pytest.mark.parametrize("name", ["MLA and experts", "GQA"])
def test_b066_cached_pages_change_no_bit(name: str) -> None:
    """A prompt of two pieces alone, again while others run, as the start of a longer one, and preempted."""
    if name in MODELS:
        tiny = server(MODELS[name], num_pages=60)
    else:
        tiny = TinyServer(60, dtype="bfloat16", deterministic=True, max_position_embeddings=640)
    ids = prompt(30, 300)

    def mine(tail: list[int]) -> TokenRequest:
        return tiny.request(ids + tail, 12, logprobs=4, temperature=0.8, seed=5)

    tails: list[list[int]] = [[], [], prompt(31, 40)]
    cold = [bits(tiny.run([mine(tail)])[0]) for tail in tails]
    assert tiny.stats.prefix_hit_tokens_total == 0
    others, steps = company(tiny, 5, 4)
    results = tiny.run([*map(mine, tails), *others], at_steps=[0, 20, 23, *[step + 10 for step in steps]])
    assert [result.cached_tokens for result in results[:3]] == [0, 256, 256]
    assert [bits(result) for result in results[:3]] == cold
    tiny.runner.close()


def test_b064_five_rounds_of_48_requests_are_one() -> None:
    for seqs in (8, 44):
        tiny = server(MODELS["MLA and experts"], seqs=seqs, num_pages=400)
        rounds = []
        for _ in range(5):
            requests = [
                tiny.request(prompt(i, 3 + 11 * i % 80), 12, logprobs=2, temperature=0.7 * (i % 2), seed=i)
                for i in range(48)
            ]
            rounds.append([bits(result) for result in tiny.run(requests)])
        tiny.runner.close()
        assert all(one == rounds[0] for one in rounds[1:]), f"{seqs} slots"


def test_without_the_mode_company_shows() -> None:
    """What the tests above compare does differ where the mode is off."""
    tiny = server(MODELS["MLA and experts"], deterministic=False)
    alone = [bits(tiny.run([request])[0]) for request in watched(tiny)]
    others, steps = company(tiny, 3, 8)
    mine = watched(tiny)
    results = tiny.run([*mine, *others], at_steps=[*([0] * len(mine)), *steps])
    assert [bits(result) for result in results[: len(mine)]] != alone
    tiny.runner.close()
