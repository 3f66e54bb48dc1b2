"""Takes a tokenizer.model that is a list of ranks (tiktoken's format, a line a token); gives its BPE, to `tokenizer`.

The file holds no rule for cutting a text into words, nor what stands before one: both are in the code that comes with
such a checkpoint, which we do not run. So the classes that are known are in a table here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError
from jaxserve.text.token_bytes import byte_alphabet


@dataclass(frozen=True, slots=True)
class Rules:
    """What a tokenizer's code adds to its file."""

    words: str  # pattern of what is cut before any merge
    before: tuple[str, ...]  # special tokens before a text


# By tokenizer_class of tokenizer_config.json.
KNOWN = {
    "ChatGLM4Tokenizer": Rules(  # GLM-4-9B in its first form; the later one writes the same pattern into tokenizer.json
        words=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        before=("[gMASK]", "<sop>"),
    )
}


def is_ranks_file(path: Path) -> bool:
    """Whether the file begins as such a list does: a token in base64 and a number."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(1024).split()
    return len(first) == 2 and first[1].isdigit() and base64_bytes(first[0]) is not None


def read_ranks(path: Path, config: Mapping[str, Any]) -> Backend:
    """The tokenizer of a ranks file and its tokenizer_config.json.

    Raises CheckpointError for a damaged file, and for a tokenizer_class whose rules are not known.
    """
    name = config.get("tokenizer_class")
    rules = KNOWN.get(name) if isinstance(name, str) else None
    if rules is None:
        raise CheckpointError(
            f"{path}: a list of ranks, and tokenizer_class is {name!r}, supported: {', '.join(KNOWN)} (others need a "
            "tokenizer.json)"
        )
    vocabulary, merges = vocabulary_and_merges(ranks_of(path))
    backend = Backend(models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(rules.words), behavior="isolated", invert=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    backend.decoder = decoders.ByteLevel()
    added = sorted((int(token), entry) for token, entry in (config.get("added_tokens_decoder") or {}).items())
    for token, entry in added:
        backend.add_special_tokens([AddedToken(entry["content"], normalized=False, special=True)])
        if backend.token_to_id(entry["content"]) != token:
            raise CheckpointError(
                f"{path}: has {len(vocabulary)} ranks, so {entry['content']} cannot be id {token}, as "
                "tokenizer_config.json says"
            )
    ids = {text: backend.token_to_id(text) for text in rules.before}
    if None in ids.values():
        raise CheckpointError(f"{path}: tokenizer_config.json lacks a token of {', '.join(ids)}, which {name} needs")
    backend.post_processor = processors.TemplateProcessing(
        single=[*ids, "$A"], special_tokens=[(text, token) for text, token in ids.items() if token is not None]
    )
    return backend


def ranks_of(path: Path) -> dict[bytes, int]:
    """Token -> rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        parts = line.split()
        token = base64_bytes(parts[0]) if len(parts) == 2 and parts[1].isdigit() else None
        if token is None:
            raise CheckpointError(f"{path}: line {number}: a token in base64 and its rank are expected")
        ranks[token] = int(parts[1])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: its {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def vocabulary_and_merges(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The same BPE as vocabulary and merges, in the alphabet that writes a byte as a character.

    tiktoken joins the two neighbours whose whole has the lowest rank: so each way to make a token of two others is a
    merge, in the order of the whole's rank, then of the parts'.
    """
    characters = [chr(byte) for byte in range(256)]
    for code, byte in byte_alphabet().items():
        characters[byte] = chr(code)
    texts = {token: "".join(map(characters.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        ways = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        ways.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(texts[left], texts[right]) for left, right in ways]
    return {texts[token]: rank for token, rank in ranks.items()}, merges


def base64_bytes(text: bytes) -> bytes | None:
    """The bytes that stand in base64; None if they do not."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
