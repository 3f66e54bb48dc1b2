"""Logprobs of sampled tokens and of prompts: each row its own, one entry a token, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.harness import Bench, make_request
from tests.fakes.runner import fake_logprob, make_shape


def check_logprobs(bench: Bench, handle: int, top: int) -> None:
    """One entry a token, and the values that the model gives for this history."""
    history = bench.requests[handle].prompt_token_ids
    answer = bench.answers[handle]
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.top_ids.shape == entry.top.shape == (1, top)
        assert entry.chosen[0] == np.float32(fake_logprob(history, token))
        assert entry.top_ids[0].tolist() == list(range(token, token + top))
        history = np.append(history, token)


@pytest.mark.parametrize("lanes", [1, 2])
def test_b059_rows_are_not_shifted(lanes: int) -> None:
    """B059 without drafts: R1 decodes, R2 is in a middle chunk, R3 decodes; logprobs on R1 and R3."""
    bench = Bench(make_shape(lanes=lanes), budget_tokens=24)
    bench.submit(make_request(1, 5, 20, logprobs=2), make_request(3, 5, 12, logprobs=2))
    bench.step(3)
    bench.submit(make_request(2, 100, 4), make_request(4, 50, 3, logprobs=5))
    bench.finish()
    for handle, top in ((1, 2), (3, 2), (4, 5)):
        check_logprobs(bench, handle, top)
        assert bench.tokens(handle) == bench.solo(handle)
    assert bench.answers[2].logprobs == []


@pytest.mark.parametrize("max_tokens", [1, 3])
@pytest.mark.parametrize("logprobs", [0, 1, 20])
def test_b061_exactly_one_entry_a_token(max_tokens: int, logprobs: int) -> None:
    """B061: a prompt of 40 in chunks of 16."""
    bench = Bench(make_shape(num_slots=4), budget_tokens=16)
    bench.submit(make_request(1, 40, max_tokens, logprobs=logprobs))
    bench.finish()
    assert len(bench.answers[1].logprobs) == max_tokens
    check_logprobs(bench, 1, logprobs)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("prompt_tokens", "top"), [(1, 3), (2, 0), (15, 1), (16, 1), (17, 1), (200, 20)])
def test_prompt_logprobs_are_joined_over_chunks(prompt_tokens: int, top: int, lanes: int) -> None:
    bench = Bench(make_shape(lanes=lanes), budget_tokens=32)
    bench.submit(make_request(1, prompt_tokens, 3, prompt_logprobs=top), make_request(2, 50, 9, logprobs=1))
    bench.finish()
    prompt, scores = bench.requests[1].prompt_token_ids, bench.answers[1].prompt_logprobs
    assert scores is not None and scores.top.shape == (prompt_tokens - 1, top)
    expected = [fake_logprob(prompt[:at], int(prompt[at])) for at in range(1, prompt_tokens)]
    assert scores.chosen.tolist() == [float(np.float32(value)) for value in expected]
    assert scores.rank.dtype == np.int32 and scores.chosen.dtype == np.float32
    if top:
        assert scores.top_ids[:, 0].tolist() == prompt[1:].tolist()
    check_logprobs(bench, 2, 1)
    assert bench.tokens(1) == bench.solo(1)


@pytest.mark.parametrize("preempt_after", range(1, 9))
def test_prompt_logprobs_survive_preemption(preempt_after: int) -> None:
    """In the middle of the prompt they start over; once given out they are not computed again."""
    bench = Bench(budget_tokens=32)
    bench.submit(make_request(1, 90, 6, prompt_logprobs=2, logprobs=1))
    bench.step(preempt_after)
    bench.preempt(1)
    before = bench.runner.counts["scored"]
    bench.finish()
    prompt, scores = bench.requests[1].prompt_token_ids, bench.answers[1].prompt_logprobs
    assert scores is not None
    expected = [np.float32(fake_logprob(prompt[:at], int(prompt[at]))) for at in range(1, 90)]
    assert scores.chosen.tolist() == [float(value) for value in expected]
    assert bench.tokens(1) == bench.solo(1)
    check_logprobs(bench, 1, 1)
    if preempt_after >= 4:
        assert bench.runner.counts["scored"] == before
