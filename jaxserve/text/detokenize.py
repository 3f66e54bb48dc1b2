"""Takes new token ids of one sequence; gives the text that is complete, to `stop`.

What is held back is decided on raw bytes: the beginning of a UTF-8 character whose rest is still to come, at most three
bytes. A U+FFFD that the model itself writes is complete and passes at once. Bytes that can no longer become a character
give one U+FFFD each maximal broken part, so that the stream always equals the decoding of all bytes together.
"""

from __future__ import annotations

from codecs import utf_8_decode

from jaxserve.text.tokenizer import Tokenizer

NO_IDS: frozenset[int] = frozenset()


class Detokenizer:
    """One sequence's text so far; constant work a token."""

    __slots__ = ("_bytes", "_pending", "_skip", "_texts")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._texts = tokenizer.token_texts
        self._bytes = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else NO_IDS
        self._pending = b""

    def push(self, token: int) -> str:
        """The text that this id completes. Ids outside the vocabulary and skipped special tokens add nothing."""
        if token in self._skip or not 0 <= token < len(self._bytes):
            return ""
        if not self._pending:
            text = self._texts[token]
            if text is not None:
                return text
        data = self._pending + self._bytes[token]
        text, used_bytes = utf_8_decode(data, "replace", False)
        self._pending = data[used_bytes:]
        return text

    def flush(self) -> str:
        """The end: half a character that is left becomes one U+FFFD, the same in streams and whole answers."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text
