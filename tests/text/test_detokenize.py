"""Incremental detokenisation: area E of the bug reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.detokenize import Detokenizer
from tests.text.scripted import pieces

REPLACEMENT = "\ufffd"


def stream(vocabulary, ids) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_b050_space_led_token_while_bytes_are_pending():
    vocabulary = pieces(b"\xe8\xaf", " ok", b"\xad")
    assert stream(vocabulary, [0, 1, 2]) == ["", REPLACEMENT + " ok", REPLACEMENT, ""]
    assert stream(vocabulary, [0, 2, 1]) == ["", "\u8bed", " ok", ""]


def test_b052_end_in_the_middle_of_a_character_is_one_replacement():
    assert stream(pieces(b"\xf0\x9f\x98"), [0]) == ["", REPLACEMENT]


def test_b054_real_replacement_character_passes_at_once():
    vocabulary = pieces(b"\xef\xbf\xbd", "x")
    assert stream(vocabulary, [0] * 50 + [1]) == [REPLACEMENT] * 50 + ["x", ""]


def test_half_characters_never_leave_and_at_most_three_bytes_wait():
    vocabulary = pieces(*[bytes([byte]) for byte in "a😀東é".encode()])
    parts = stream(vocabulary, range(len(vocabulary.token_bytes)))
    assert [part for part in parts if part] == ["a", "😀", "東", "é"]


def test_special_tokens_are_skipped_or_shown():
    vocabulary = pieces("a", "<|user|>", special=[1])
    assert stream(vocabulary, [0, 1, 0]) == ["a", "", "a", ""]
    shown = Detokenizer(vocabulary, skip_special_tokens=False)
    assert [shown.push(token) for token in (0, 1)] == ["a", "<|user|>"]


def test_ids_that_no_token_has_add_nothing():
    assert stream(pieces("a"), [0, 5, -1, 0]) == ["a", "", "", "a", ""]


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_stream_equals_decoding_all_bytes(parts):
    assert "".join(stream(pieces(*parts), range(len(parts)))) == b"".join(parts).decode("utf-8", "replace")


@given(st.text(max_size=20), st.lists(st.integers(1, 4), max_size=80))
def test_valid_text_never_shows_a_replacement(text, cuts):
    data, parts = text.encode(), []
    for cut in cuts:
        parts.append(data[:cut])
        data = data[cut:]
    joined = stream(pieces(*parts, data), range(len(parts) + 1))
    assert "".join(joined) == text


@pytest.mark.parametrize("text", ["hello world", "東京は今日も晴れ😀", "Köln\n\n  x"])
def test_both_kinds_of_tokenizer_stream_their_own_text(tokenizer, metaspace, text):
    for one, first in ((tokenizer, ""), (metaspace, " ")):
        detokenizer = Detokenizer(one)
        parts = [detokenizer.push(token) for token in one.encode(text)]
        assert "".join(parts) + detokenizer.flush() == first + text
