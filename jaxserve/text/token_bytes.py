"""Takes a tokenizer's vocabulary and its decoder rule from tokenizer.json; gives the table id -> bytes.

Three kinds of rule, all of which come down to "the text is the tokens' bytes, joined":
  byte-level BPE       each character of a token stands for one byte (GPT-2's alphabet)
  metaspace            U+2581 stands for a space
  byte fallback        a token written <0xE8> is that byte
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from jaxserve.errors import ModelError

METASPACE = "\u2581"
FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
KNOWN_RULES = ("ByteLevel", "Metaspace", "ByteFallback", "Replace", "Fuse", "Strip")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """By id: the bytes of each token, and its text where the bytes alone are valid UTF-8 (else None)."""

    token_bytes: list[bytes]
    token_texts: list[str | None]
    strips_first_space: bool  # the tokenizer puts a space before a text's first word, and decoding takes it off


def token_table(
    decoder: dict[str, Any] | None, vocabulary: Mapping[str, int], added: Mapping[int, AddedToken]
) -> TokenTable:
    """The table for a tokenizer.json `decoder` entry. Raises ModelError for a rule that is not of the three kinds.

    Added tokens stand for their own text, whatever the rule.
    """
    rules = flatten(decoder)
    for rule in rules:
        if rule["type"] not in KNOWN_RULES:
            raise ModelError(f"tokenizer.json: decoder {rule['type']} is not supported, only {', '.join(KNOWN_RULES)}")
    kinds = {rule["type"] for rule in rules}
    replaces = [(rule.get("replacement", METASPACE), " ") for rule in rules if rule["type"] == "Metaspace"]
    for rule in rules:
        if rule["type"] == "Replace" and "String" in rule["pattern"]:
            replaces.append((rule["pattern"]["String"], rule["content"]))
    alphabet = byte_alphabet() if "ByteLevel" in kinds else None
    table = [b""] * (max([-1, *vocabulary.values(), *added]) + 1)
    for token, index in vocabulary.items():
        table[index] = one_token(token, alphabet, replaces, "ByteFallback" in kinds)
    for index, entry in added.items():
        table[index] = entry.content.encode("utf-8")
    return TokenTable(table, [whole_text(data) for data in table], any(map(strips_first, rules)))


def flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The rules of a decoder, sequences opened."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [rule for part in decoder["decoders"] for rule in flatten(part)]
    return [decoder]


def strips_first(rule: dict[str, Any]) -> bool:
    """Whether this rule takes the first space off a whole text."""
    if rule["type"] == "Strip":
        return rule.get("content") == " " and rule.get("start", 0) > 0
    return rule["type"] == "Metaspace" and rule.get("prepend_scheme", "always") != "never"


def byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet as a table for str.translate: code point of the stand-in -> byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes got code points from 256 up, in byte order.
    """
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {256 + at: byte for at, byte in enumerate(others)}


def one_token(
    token: str, alphabet: dict[int, int] | None, replaces: list[tuple[str, str]], byte_fallback: bool
) -> bytes:
    """The bytes that one vocabulary entry stands for."""
    if alphabet is not None:
        try:
            return token.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:  # not written in the alphabet: some files hold plain text among the entries
            return token.encode("utf-8")
    if byte_fallback and (match := FALLBACK_BYTE.fullmatch(token)):
        return bytes([int(match[1], 16)])
    for old, new in replaces:
        token = token.replace(old, new)
    return token.encode("utf-8")


def whole_text(data: bytes) -> str | None:
    """The text of these bytes, None where they are not valid UTF-8 by themselves."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
