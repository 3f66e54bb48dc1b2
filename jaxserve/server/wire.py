"""Between the wire and our own words: takes proto messages, gives prompts and SamplingParams; takes deltas, gives proto
messages. And the way back, for clients. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput, Finish, Logprob, RequestOutput, SamplingParams, check_int
from jaxserve.text.chat import check_text
from jaxserve.v1 import inference_pb2 as pb

MAX_REQUEST_ID_CHARACTERS = 256

SCALARS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "detokenize",
    "cache_salt",
    "bypass_prefix_cache",
    "priority",
)

FINISH_CODES = {code.text: cast(pb.FinishReason, int(code)) for code in Finish}  # the same numbers

type Prompt = str | Sequence[int]


def sampling_params(message: pb.SamplingParams, max_n: int) -> SamplingParams:
    """SamplingParams of the fields that are set; the others keep their defaults, and max_tokens is "what fits".

    Raises InvalidRequest for the first field out of range.
    """
    given: dict[str, Any] = {"max_tokens": None}
    given.update((name, getattr(message, name)) for name in SCALARS if message.HasField(name))
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias.items())
    if message.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = list(message.allowed_token_ids.ids)
    for name in ("bad_words", "stop", "stop_token_ids"):
        given[name] = tuple(getattr(message, name))
    check_int("n", given.get("n", 1), 1, max_n)
    return SamplingParams(**given)


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The inverse, for clients: only fields that differ from their defaults travel."""
    usual = SamplingParams()
    message = pb.SamplingParams()
    for name in SCALARS:
        value = getattr(params, name)
        if value is not None and (name == "max_tokens" or value != getattr(usual, name)):
            try:
                setattr(message, name, value)
            except (TypeError, ValueError, OverflowError):
                raise InvalidRequest(name, value, "what the field's type can hold") from None
    for token, bias in (params.logit_bias or {}).items():
        message.logit_bias[token] = bias
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(int(token) for token in params.allowed_token_ids)
    message.bad_words.extend(check_text("bad_words", word) for word in params.bad_words)
    message.stop.extend(check_text("stop", stop) for stop in params.stop)
    message.stop_token_ids.extend(int(token) for token in params.stop_token_ids)
    return message


def prompt_of(message: pb.GenerateRequest) -> Prompt:
    """The text or the ids, these as the message's own: a million of them is refused without a copy. Raises
    InvalidRequest where neither is set.
    """
    which = message.WhichOneof("prompt")
    if which is None:
        raise InvalidRequest("prompt", None, "text or token_ids")
    return message.text if which == "text" else message.token_ids.ids


def chat_messages(message: pb.ChatRequest) -> list[dict[str, str]]:
    """Messages as chat templates take them. Raises InvalidRequest where there is none, or one has no role."""
    if not message.messages:
        raise InvalidRequest("messages", [], "at least one message")
    for at, entry in enumerate(message.messages):
        if not entry.role:
            raise InvalidRequest(f"messages[{at}].role", "", "a role that the chat template knows")
    return [{"role": entry.role, "content": entry.content} for entry in message.messages]


def template_kwargs(message: pb.ChatRequest) -> dict[str, Any]:
    """Values for the chat template; whole numbers come as int. Raises InvalidRequest for NaN and infinity."""
    try:
        return MessageToDict(message.template_kwargs) if message.HasField("template_kwargs") else {}
    except ValueError:
        raise InvalidRequest("template_kwargs", "NaN or infinity", "values that JSON can hold") from None


def request_id_of(given: str) -> str:
    """The id given, checked; "" where none is. Raises InvalidRequest where it is too long."""
    if len(given) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest("request_id", given, f"at most {MAX_REQUEST_ID_CHARACTERS} characters")
    return given


def fill_response(response: pb.GenerateResponse | pb.ChatResponse, delta: RequestOutput) -> None:
    """Add a delta's choices and prompt logprobs to a response."""
    for output in delta.outputs:
        choice = response.choices.add(index=output.index, text=output.text, token_ids=output.token_ids)
        if output.logprobs:
            for position in output.logprobs:
                add_position(choice.logprobs.add(), position)
        if output.finish_reason is not None:
            choice.finish_reason = FINISH_CODES[output.finish_reason]
            if isinstance(output.stop_reason, str):
                choice.stop_string = output.stop_reason
            elif output.stop_reason is not None:
                choice.stop_token_id = output.stop_reason
    if delta.prompt_logprobs:
        for position in delta.prompt_logprobs:
            if position is not None:  # the prompt's first token has nothing before it
                add_position(response.prompt_logprobs.add(), position)


def add_position(target: pb.PositionLogprobs, position: Mapping[int, Logprob]) -> None:
    """One position's entries, chosen token first."""
    for token, entry in position.items():
        target.tokens.add(token_id=token, logprob=entry.logprob, rank=entry.rank or 0, text=entry.decoded_token or "")


def position_of(message: pb.PositionLogprobs) -> dict[int, Logprob]:
    """The inverse of add_position."""
    return {t.token_id: Logprob(t.logprob, t.rank or None, t.text) for t in message.tokens}


def output_of(message: pb.GenerateResponse | pb.ChatResponse, request_id: str, prompt: str | None) -> RequestOutput:
    """One response of a stream as a RequestOutput that holds only what is new."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=list(message.prompt_token_ids),
        outputs=[choice_of(choice) for choice in message.choices],
        finished=message.HasField("usage"),
        prompt_logprobs=prompt_positions(message.prompt_logprobs),
        num_cached_tokens=message.usage.cached_tokens,
    )


def choice_of(message: pb.ChoiceDelta) -> CompletionOutput:
    """The inverse of what fill_response does with one choice."""
    which = message.WhichOneof("stop_reason")
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=[position_of(position) for position in message.logprobs] or None,
        finish_reason=Finish(message.finish_reason).text,
        stop_reason=getattr(message, which) if which else None,
    )


def prompt_positions(messages: Iterable[pb.PositionLogprobs]) -> list[dict[int, Logprob] | None] | None:
    """Prompt logprobs as vLLM users know them: None for the first token, then one dict a token."""
    positions = [position_of(message) for message in messages]
    return [None, *positions] if positions else None
