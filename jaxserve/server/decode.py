"""The first thing that sees a request: takes bytes from the wire, gives messages, or the reason why they are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from jaxserve.errors import InvalidRequest

MAX_DEPTH = 64  # messages inside messages; Struct can nest

WIRE_VARINT, WIRE_64_BIT, WIRE_BYTES, WIRE_32_BIT = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class BadMessage:
    """Stands in for a message that could not be read; the handler answers with the error."""

    error: InvalidRequest


def deserializer[M: Message](message_class: type[M]) -> Callable[[bytes], M | BadMessage]:
    """A deserializer that never raises: gRPC would turn that into INTERNAL without saying which field it was."""

    def read(raw: bytes) -> M | BadMessage:
        try:
            return message_class.FromString(raw)
        except DecodeError:
            return BadMessage(blame(raw, cast(Descriptor, message_class.DESCRIPTOR)))

    return read


def blame(raw: bytes, descriptor: Descriptor) -> InvalidRequest:
    """The first field that makes `raw` unreadable: text that is not UTF-8 (lone surrogates too), or broken framing."""
    try:
        for path, text in string_fields(memoryview(raw), descriptor, "", 0):
            try:
                str(text, "utf-8")
            except UnicodeDecodeError as error:
                given = bytes(text[error.start : error.start + 8])
                return InvalidRequest(path, given, f"UTF-8 text without lone surrogates (byte {error.start} is not)")
    except ValueError:
        pass
    return InvalidRequest(descriptor.name, f"{len(raw)} bytes", f"a serialised {descriptor.full_name}")


def string_fields(raw: memoryview, descriptor: Descriptor, prefix: str, depth: int) -> Iterator[tuple[str, memoryview]]:
    """Path and bytes of each string field, in wire order. Raises ValueError where the framing is broken."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    seen: dict[int, int] = {}
    for number, content in length_delimited(raw):
        described = descriptor.fields_by_number.get(number)
        if described is None:
            continue
        name = f"{prefix}{described.name}"
        if described.is_repeated:
            name += f"[{seen.get(number, 0)}]"
            seen[number] = seen.get(number, 0) + 1
        if described.type == FieldDescriptor.TYPE_STRING:
            yield name, content
        elif described.message_type is not None:
            yield from string_fields(content, described.message_type, f"{name}.", depth + 1)


def length_delimited(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Field number and content of each length-delimited field. Raises ValueError where the framing is broken."""
    at = 0
    while at < len(raw):
        key, at = read_varint(raw, at)
        wire_type = key & 7
        if wire_type == WIRE_BYTES:
            size_bytes, at = read_varint(raw, at)
            if at + size_bytes > len(raw):
                raise ValueError("a field reaches past the end")
            yield key >> 3, raw[at : at + size_bytes]
            at += size_bytes
        elif wire_type == WIRE_VARINT:
            _, at = read_varint(raw, at)
        elif wire_type in (WIRE_64_BIT, WIRE_32_BIT):
            at += 8 if wire_type == WIRE_64_BIT else 4
        else:
            raise ValueError("an unknown wire type")


def read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    """The number at `at` and the index behind it. Raises ValueError where there is none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a varint without an end")
