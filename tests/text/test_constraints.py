"""Stops, bad words, biases and allowed ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from jaxserve.text.constraints import TextLimits
from jaxserve.text.prepare import prepare


def told(tokenizer, limits, **params):
    return prepare([5], SamplingParams(**params), limits, tokenizer).requests[0]


def test_b041_eos_ids_are_folded_in_unless_ignored(tokenizer, limits):
    limits = replace(limits, eos_token_ids=(1, 2))
    request = told(tokenizer, limits, stop_token_ids=[9], min_tokens=2)
    assert request.stop_token_ids == (1, 2, 9) == request.masked_until_min
    request = told(tokenizer, limits, stop_token_ids=[9], ignore_eos=True, min_tokens=2)
    assert request.stop_token_ids == (9,) == request.masked_until_min


def test_b022_stop_ids_outside_the_vocabulary_are_kept_away_from_the_engine():
    limits = TextLimits(64, 129280, 64, (1,))
    request = told(None, limits, stop_token_ids=[151645, 2**40], min_tokens=4)
    assert request.stop_token_ids == (1,) == request.masked_until_min


def test_stop_ids_are_limited_together_with_the_models_own(limits):
    limits = replace(limits, eos_token_ids=(1, 2))
    ids = list(range(10, 73))
    assert len(told(None, limits, stop_token_ids=ids[:62]).stop_token_ids) == 64
    with pytest.raises(InvalidRequest, match="stop_token_ids: got 65 ids with the model's own, allowed: at most 64"):
        told(None, limits, stop_token_ids=ids)


def test_b045_a_stop_string_that_is_a_special_token_stops_by_its_id(tokenizer, limits):
    prepared = prepare([5], SamplingParams(stop=["<|user|>", "x"], stop_token_ids=[9]), limits, tokenizer)
    assert prepared.requests[0].stop_token_ids == (2, 3, 9)
    assert prepared.stop_reasons == {3: "<|user|>", 9: 9}


def test_stop_strings_need_text(tokenizer, limits):
    with pytest.raises(InvalidRequest, match="stop: .*detokenize false"):
        told(tokenizer, limits, stop=["x"], detokenize=False)


@pytest.mark.parametrize("name", ["tokenizer", "metaspace"])
def test_bad_words_with_and_without_a_space(name, request, limits):
    tokenizer = request.getfixturevalue(name)
    limits = replace(limits, vocab_size=tokenizer.vocab_size)
    told_request = told(tokenizer, limits, bad_words=["hello", "world"])
    forms = [*((token,) for token in told_request.banned_token_ids), *told_request.bad_sequences]
    assert {"".join(map(tokenizer.token_text, form)) for form in forms} == {"hello", " hello", "world", " world"}
    assert all(len(form) > 1 for form in told_request.bad_sequences) and told_request.banned_token_ids


def test_bad_word_of_too_many_tokens(tokenizer, limits):
    with pytest.raises(InvalidRequest, match="bad_words: got 'qqqqqqqqqq', allowed: words of at most 8 tokens; .* 10"):
        told(tokenizer, limits, bad_words=["q" * 10])


def test_bias_of_minus_infinity_is_a_ban(tokenizer, limits):
    request = told(tokenizer, limits, logit_bias={9: -1e9, 7: -float("inf"), 8: 2})
    assert request.logit_bias == ((8, 2.0), (9, -1e9)) and request.banned_token_ids == (7,)


@pytest.mark.parametrize("params", [{"logit_bias": {100_000: 1.0}}, {"allowed_token_ids": [100_000]}])
def test_ids_outside_the_vocabulary(tokenizer, limits, params):
    (field,) = params
    with pytest.raises(InvalidRequest, match=f"^{field}: got 100000, allowed: ids from 0 to {limits.vocab_size - 1}"):
        told(tokenizer, limits, **params)


@pytest.mark.parametrize("token", [-1, 1.5, True, "a"])
def test_allowed_ids_are_ids(tokenizer, limits, token):
    with pytest.raises(InvalidRequest, match="^allowed_token_ids: "):
        told(tokenizer, limits, allowed_token_ids=[token])


def test_allowed_ids_are_sorted_and_single(tokenizer, limits):
    assert told(tokenizer, limits, allowed_token_ids=[9, 7, 9]).allowed_token_ids == (7, 9)
    assert told(tokenizer, limits).allowed_token_ids is None


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [7], "logit_bias": {7: -float("inf")}},
        {"allowed_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1},
    ],
)
def test_something_must_be_left_to_sample(tokenizer, limits, params):
    with pytest.raises(InvalidRequest, match="^allowed_token_ids: .* leave free"):
        told(tokenizer, limits, **params)


def test_the_whole_vocabulary_cannot_be_forbidden():
    limits = TextLimits(64, 6, 64)
    with pytest.raises(InvalidRequest, match="6 forbidden ids, allowed: at least one id left"):
        told(None, limits, logit_bias={token: -float("inf") for token in range(6)})
