"""Shared pages on the real runner, whose cache starts full of NaN: the ids are those of a plain model without one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes.tiny import VOCAB, TinyServer, greedy


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, tokens).tolist()


@pytest.fixture(scope="module", params=[1, 2])
def lanes(request: pytest.FixtureRequest, tiny: TinyServer) -> Iterator[TinyServer]:
    """One lane, and two on two devices."""
    if request.param == 1:
        yield tiny
        return
    server = TinyServer(mesh=(1, 1, 2), num_pages=40)
    yield server
    server.runner.close()


def test_shared_prompts_give_the_ids_of_unshared_ones(lanes: TinyServer) -> None:
    """Four prompts with common starts, each twice and in company, then longer ones behind them."""
    weights = lanes.weights()
    prompts = [prompt(1, 70), prompt(1, 40) + prompt(2, 30), prompt(3, 33), prompt(3, 17)]
    prompts += [*prompts, *(ids + prompt(4, 9) for ids in prompts)]
    wanted = {tuple(ids): greedy(lanes.spec, weights, ids, 10) for ids in prompts}
    at_steps = [*(6 * i for i in range(4)), 40, 40, 41, 42, *(60 + i for i in range(4))]
    before = lanes.runner.compilations_after_warmup  # other tests of this process compile, too
    results = lanes.run([lanes.request(ids, 10) for ids in prompts], at_steps=at_steps)
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == wanted[tuple(ids)]
    assert [result.cached_tokens for result in results[4:]] == [64, 64, 32, 16, 64, 64, 32, 16]
    assert lanes.runner.compilations_after_warmup == before


def test_b008_evicted_pages_are_nobodys(tiny: TinyServer) -> None:
    """B008 with real numbers: a pool of twelve pages in which shared starts come, go and are written over."""
    tight, weights = TinyServer(num_pages=12), tiny.weights()
    prompts = [prompt(1, 48) + prompt(10 + i % 5, 8 + i % 3) for i in range(24)]
    wanted = {tuple(ids): greedy(tight.spec, weights, ids, 12) for ids in prompts}
    results = tight.run([tight.request(ids, 12) for ids in prompts], at_steps=[3 * i for i in range(24)])
    assert all(result.token_ids == wanted[tuple(ids)] for ids, result in zip(prompts, results, strict=True))
    assert tight.stats.evicted_pages_total > 0 and tight.stats.prefix_hit_tokens_total > 0
    tight.runner.close()
