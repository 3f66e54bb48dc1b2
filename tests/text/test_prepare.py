"""Prompts and lengths: area D of the bug reports, seeds, and what the engine is told."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.text.prepare import encode_text, mix_seed, prepare
from jaxserve.text.tokenizer import load_tokenizer
from tests.fakes.tokenizer import tiny_tokenizer_dir

PARAMS = SamplingParams()


def test_text_becomes_ids_and_ids_stay(tokenizer, limits):
    prepared = prepare("hello world", PARAMS, limits, tokenizer)
    assert prepared.prompt == "hello world" and prepared.prompt_token_ids == tokenizer.encode("hello world")
    (request,) = prepared.requests
    assert request.prompt_token_ids.dtype == np.int32 and request.prompt_token_ids.tolist() == prepared.prompt_token_ids
    for ids in ([5, 6], (5, 6), np.array([5, 6])):
        prepared = prepare(ids, PARAMS, limits, tokenizer)
        assert prepared.prompt is None and prepared.prompt_token_ids == [5, 6]


def test_numbers_reach_the_engine(tokenizer, limits):
    params = SamplingParams(
        temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logprobs=2, prompt_logprobs=1, min_tokens=3, stop=["x"], priority=4,
    )  # fmt: skip
    (request,) = prepare([5], params, limits, tokenizer).requests
    given = (request.temperature, request.top_k, request.top_p, request.min_p, request.repetition_penalty)
    assert given == (0.5, 0, 0.9, 0.1, 1.1)
    assert (request.presence_penalty, request.frequency_penalty, request.logprobs, request.prompt_logprobs) == (
        0.2, 0.3, 2, 1,
    )  # fmt: skip
    assert (request.min_tokens, request.text_stop_pending, request.priority, request.max_tokens) == (3, True, 4, 16)


@pytest.mark.parametrize("prompt", ["", [], np.array([], np.int32)])
def test_b035_empty_prompt_is_refused(tokenizer, limits, prompt):
    with pytest.raises(InvalidRequest, match="at least one token|of at least one token"):
        prepare(prompt, PARAMS, limits, tokenizer)


def test_b035_a_space_is_a_prompt_and_bos_alone_is_one(tokenizer, limits, tmp_path):
    assert len(prepare(" ", PARAMS, limits, tokenizer).prompt_token_ids) == 1
    with_bos = load_tokenizer(tiny_tokenizer_dir(tmp_path, add_bos_token=True))
    assert prepare("", PARAMS, limits, with_bos).prompt_token_ids == [0]
    with pytest.raises(InvalidRequest, match="prompt_token_ids: got no tokens"):
        prepare([], PARAMS, limits, with_bos)


def test_b037_prompt_and_context(tokenizer, limits):
    (request,) = prepare([5] * 63, SamplingParams(max_tokens=None), limits, tokenizer).requests
    assert request.max_tokens == 1
    for count in (64, 65, 10_000):
        with pytest.raises(
            InvalidRequest, match=rf"got {count} tokens, allowed: at most 63 tokens \(max_model_len 64,"
        ):
            prepare([5] * count, PARAMS, limits, tokenizer)


def test_b037_prompt_and_pool(tokenizer, limits):
    small = replace(limits, max_model_len=1024, pool_tokens=48)
    assert prepare([5] * 47, PARAMS, small, tokenizer).requests[0].max_tokens == 1
    with pytest.raises(InvalidRequest, match="got 48 tokens, allowed: at most 47 tokens .*cache pool of 48 tokens"):
        prepare([5] * 48, PARAMS, small, tokenizer)


def test_b039_max_tokens_is_clipped_to_what_fits(tokenizer, limits):
    wide = replace(limits, max_model_len=2048, pool_tokens=1 << 20)
    assert prepare([5] * 8, SamplingParams(max_tokens=2045), wide, tokenizer).requests[0].max_tokens == 2040
    assert prepare([5] * 8, SamplingParams(max_tokens=None), wide, tokenizer).requests[0].max_tokens == 2040
    (request,) = prepare([5] * 60, SamplingParams(max_tokens=99, min_tokens=50), limits, tokenizer).requests
    assert (request.max_tokens, request.min_tokens) == (4, 4)


def test_b047_n_over_the_limit_is_refused_else_n_requests(tokenizer, limits):
    assert len(prepare([5], SamplingParams(n=9), limits, tokenizer).requests) == 9
    with pytest.raises(InvalidRequest, match="n: got 10000, allowed: 1 to 9"):
        prepare([5], SamplingParams(n=10_000), limits, tokenizer)


@pytest.mark.parametrize("prompt", ["hello " * 11_000_000, [5] * 1_000_000], ids=["text", "ids"])
def test_b089_over_the_context_without_long_tokenizing(tokenizer, limits, prompt):
    start_s = time.process_time()
    with pytest.raises(InvalidRequest, match="tokens, allowed: at most 63 tokens"):
        prepare(prompt, PARAMS, limits, tokenizer)
    assert time.process_time() - start_s < 1.0


def test_b093_text_that_utf8_cannot_hold_names_the_field(tokenizer, limits):
    for field, call in {
        "prompt": lambda: prepare("a\ud800", PARAMS, limits, tokenizer),
        "stop": lambda: prepare("a", SamplingParams(stop=["\udfff"]), limits, tokenizer),
        "bad_words": lambda: prepare("a", SamplingParams(bad_words=["\ud800"]), limits, tokenizer),
        "text": lambda: encode_text("text", "\ud800", tokenizer),
    }.items():
        with pytest.raises(InvalidRequest, match=f"^{field}: got '.ud|^{field}: got .*surrogate"):
            call()
    assert prepare("a\0b", PARAMS, limits, tokenizer).prompt == "a\0b"


def test_b093_a_megabyte_of_combining_marks_is_quick(tokenizer, limits):
    start_s = time.process_time()
    with pytest.raises(InvalidRequest):
        prepare("a" + "\u0301" * 1_000_000, PARAMS, limits, tokenizer)
    assert time.process_time() - start_s < 1.0


@pytest.mark.parametrize(
    "ids",
    [[-1], [10**6], [2**40], [2**70], [1.5], ["a"], [True], [[1]], np.array([1.5]), np.array([[1]]), b"ab", {1: 2}],
)
def test_b034_ids_outside_the_vocabulary_are_refused(tokenizer, limits, ids):
    with pytest.raises(InvalidRequest, match="^prompt_token_ids: got "):
        prepare(ids, PARAMS, limits, tokenizer)


def test_b034_the_last_id_is_allowed(tokenizer, limits):
    assert prepare([limits.vocab_size - 1], PARAMS, limits, tokenizer).prompt_token_ids == [limits.vocab_size - 1]
    with pytest.raises(InvalidRequest, match=f"integers from 0 to {limits.vocab_size - 1}"):
        prepare([limits.vocab_size], PARAMS, limits, tokenizer)


def test_without_a_tokenizer_ids_work_and_text_is_refused(limits):
    assert prepare([5], PARAMS, limits, None).prompt_token_ids == [5]
    for prompt, params in (("hello", PARAMS), ([5], SamplingParams(stop="x")), ([5], SamplingParams(bad_words=["x"]))):
        with pytest.raises(InvalidRequest, match="no tokenizer files, so only token ids"):
            prepare(prompt, params, limits, None)


def test_logprobs_over_the_servers_limit(tokenizer, limits):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequest, match=f"{name}: got 6, allowed: 0 to 5"):
            prepare([5], SamplingParams(**{name: 6}), replace(limits, max_logprobs=5), tokenizer)


def seeds(limits, seed, n=1, **kwargs) -> list[int]:
    return [request.seed for request in prepare([5], SamplingParams(seed=seed, n=n), limits, None, **kwargs).requests]


@pytest.mark.parametrize("seed", [-2, -1, 0, 42, 2**63 - 1, -(2**63)])
def test_b030_choices_have_seeds_of_their_own(limits, seed):
    three = seeds(limits, seed, 3)
    assert len(set(three)) == 3 and three == seeds(limits, seed, 3)
    assert seeds(limits, seed) == [three[0]] == [seed % 2**64]


def test_b028_seed_keeps_all_its_bits(limits):
    assert seeds(limits, 5) != seeds(limits, 2**32 + 5)
    for seed in (2**63, 2**64, -(2**63) - 1):
        with pytest.raises(InvalidRequest, match="^seed: "):
            SamplingParams(seed=seed)


def test_seed_unset_is_fresh_each_time(limits):
    assert seeds(limits, None) != seeds(limits, None)
    drawn = seeds(limits, None, 2, draw_seed=lambda: 7)
    assert drawn == [7, mix_seed(7, 1)]


def test_mixed_seeds_are_known_values():
    """splitmix64 from state 0: its first outputs are published."""
    assert [mix_seed(0, index) for index in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_b024_penalties_of_zero_are_refused():
    for value in (0.0, -1.0, 1e-45):
        with pytest.raises(InvalidRequest, match="^repetition_penalty: got "):
            SamplingParams(repetition_penalty=value)


def test_only_the_first_choice_computes_prompt_logprobs(limits):
    requests = prepare([5, 6], SamplingParams(n=2, prompt_logprobs=1), limits, None).requests
    assert [request.prompt_logprobs for request in requests] == [1, None]
