"""Requests that cannot be read: every one is refused with the field that is to blame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.decode import BadMessage, blame, deserializer
from jaxserve.v1 import inference_pb2 as pb

SURROGATE = b"\xed\xa0\x80"


def damaged(message: pb.GenerateRequest | pb.ChatRequest, bad: bytes = SURROGATE) -> bytes:
    """The message's bytes with the marker XYZ replaced by something that is not UTF-8."""
    raw = message.SerializeToString()
    assert raw.count(b"XYZ") == 1 and len(bad) == 3
    return raw.replace(b"XYZ", bad)


@pytest.mark.parametrize("bad", [SURROGATE, b"\xff\xff\xff", b"ab\xc3"])
@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="a XYZ b"), "text"),
        (pb.GenerateRequest(text="ok", request_id="XYZ"), "request_id"),
        (pb.GenerateRequest(text="ok", sampling=pb.SamplingParams(stop=["a", "XYZ"])), "sampling.stop[1]"),
        (
            pb.GenerateRequest(sampling=pb.SamplingParams(bad_words=["XYZ"], seed=-1, top_p=0.5)),
            "sampling.bad_words[0]",
        ),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(content="XYZ")]), "messages[1].content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_b093_text_that_is_not_utf8_names_the_field(message: pb.GenerateRequest, field: str, bad: bytes) -> None:
    read = deserializer(type(message))(damaged(message, bad))
    assert isinstance(read, BadMessage)
    assert read.error.field == field
    assert "UTF-8" in str(read.error)


def test_b093_struct_values_are_named_too() -> None:
    message = pb.ChatRequest()
    message.template_kwargs.update({"language": "XYZ"})
    read = deserializer(pb.ChatRequest)(damaged(message))
    assert isinstance(read, BadMessage)
    assert read.error.field == "template_kwargs.fields[0].value.string_value"


def test_a_readable_message_passes() -> None:
    message = pb.GenerateRequest(text="a\0b \U0001f600", sampling=pb.SamplingParams(temperature=0.0))
    assert deserializer(pb.GenerateRequest)(message.SerializeToString()) == message


def test_broken_framing_names_the_message() -> None:
    raw = pb.GenerateRequest(text="hello").SerializeToString()[:-1]
    read = deserializer(pb.GenerateRequest)(raw)
    assert isinstance(read, BadMessage)
    assert read.error.field == "GenerateRequest"
    assert f"{len(raw)} bytes" in str(read.error)


@given(st.binary(max_size=64))
def test_any_bytes_give_an_answer(raw: bytes) -> None:
    read = deserializer(pb.ChatRequest)(raw)
    assert isinstance(read, pb.ChatRequest | BadMessage)


def test_deep_nesting_ends() -> None:
    raw = b""
    for _ in range(200):
        raw = b"\x22" + varint(len(raw)) + raw
    assert blame(raw, pb.ChatRequest.DESCRIPTOR).field == "ChatRequest"


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
