"""Wire and words: unset differs from zero, every field arrives, and nothing is lost on the way back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput, Finish, Logprob, RequestOutput, SamplingParams
from jaxserve.server import wire
from jaxserve.v1 import inference_pb2 as pb

EVERY_FIELD: dict[str, Any] = {
    "n": 3,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 0.01,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {5: 1.5, 7: -math.inf},
    "allowed_token_ids": [1, 2, 5],
    "bad_words": ("no", "never"),
    "seed": -1,
    "max_tokens": 100,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop": ("END", "stop"),
    "stop_token_ids": (9, 10),
    "include_stop_str_in_output": True,
    "logprobs": 0,
    "prompt_logprobs": 5,
    "skip_special_tokens": False,
    "detokenize": True,
    "cache_salt": "",
    "bypass_prefix_cache": True,
    "priority": -3,
}


def test_every_field_of_the_parameters_travels() -> None:
    assert set(EVERY_FIELD) == set(SamplingParams.__dataclass_fields__)
    params = SamplingParams(**EVERY_FIELD)
    raw = wire.sampling_message(params).SerializeToString()
    assert wire.sampling_params(pb.SamplingParams.FromString(raw), max_n=8) == params


@pytest.mark.parametrize("name", sorted(EVERY_FIELD))
def test_each_field_travels_alone(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 100, name: EVERY_FIELD[name]})
    assert wire.sampling_params(wire.sampling_message(params), max_n=8) == params


def test_unset_differs_from_zero() -> None:
    unset = wire.sampling_params(pb.SamplingParams(), max_n=8)
    assert unset == SamplingParams(max_tokens=None)
    zero = wire.sampling_params(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0), max_n=8)
    assert (zero.temperature, zero.seed, zero.logprobs) == (0.0, 0, 0)
    for name in ("max_tokens", "n", "top_p", "repetition_penalty"):
        with pytest.raises(InvalidRequest, match=f"^{name}: got 0"):
            wire.sampling_params(pb.SamplingParams(**{name: 0}), max_n=8)


def test_an_empty_list_of_allowed_ids_is_not_an_unset_one() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        wire.sampling_params(pb.SamplingParams(allowed_token_ids=pb.TokenIds()), max_n=8)


def test_n_is_limited_by_the_server() -> None:
    with pytest.raises(InvalidRequest, match="n: got 9, allowed: an integer from 1 to 8"):
        wire.sampling_params(pb.SamplingParams(n=9), max_n=8)


def test_what_the_wire_cannot_hold_is_refused_by_the_client() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        wire.sampling_message(SamplingParams(max_tokens=1 << 40))


def test_finish_codes_are_the_protos() -> None:
    assert {code.name: int(code) for code in Finish if code} == {
        name.removeprefix("FINISH_REASON_"): number for name, number in pb.FinishReason.items() if number
    }


def test_a_prompt_is_required() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        wire.prompt_of(pb.GenerateRequest())
    assert wire.prompt_of(pb.GenerateRequest(text="")) == ""
    assert wire.prompt_of(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))) == [1, 2]


def test_template_values_keep_their_kinds() -> None:
    message = pb.ChatRequest()
    message.template_kwargs.update({"enable_thinking": False, "depth": 3, "names": ["a", None], "ratio": 0.5})
    assert wire.template_kwargs(message) == {"enable_thinking": False, "depth": 3, "names": ["a", None], "ratio": 0.5}
    message.template_kwargs.update({"bad": math.nan})
    with pytest.raises(InvalidRequest, match="template_kwargs"):
        wire.template_kwargs(message)


@pytest.mark.parametrize("stop_reason", [None, "END", 0, 9])
def test_a_delta_survives_the_way_there_and_back(stop_reason: str | int | None) -> None:
    positions = [{7: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2, "b")}]
    output = CompletionOutput(2, "héllo", [7], positions, "stop", stop_reason)
    delta = RequestOutput("id", None, [], [output], prompt_logprobs=[None, {3: Logprob(-2.0, 4, "\ufffd")}])
    response = pb.GenerateResponse()
    wire.fill_response(response, delta)
    response.usage.cached_tokens = 3
    back = wire.output_of(pb.GenerateResponse.FromString(response.SerializeToString()), "id", None)
    assert back.outputs == [output]
    assert back.prompt_logprobs == delta.prompt_logprobs
    assert back.finished and back.num_cached_tokens == 3
