"""Takes a directory with Hugging Face tokenizer files; gives text -> ids, and the table id -> bytes for the way back.

`tokenizer.json` is read with the `tokenizers` library alone: importing transformers takes seconds. A tokenizer.model
that lists ranks is read by `ranks`; a directory with only other older files is converted by `convert.py` in a process
of its own; one without any gives None, and text is then refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text.ranks import is_ranks_file, read_ranks
from jaxserve.text.token_bytes import token_table

OLD_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
CONVERSION_TIMEOUT_S = 300.0
PROBE = "a"
PROBE_GROWTH = 8  # a long text is tried by its beginning: 8 characters an allowed token, then 64, ...


class Tokenizer:
    """Text to ids, ids to bytes. Safe to use from several threads; nothing changes after construction.

    Rules: ids of special tokens written out in a text are taken as such, as transformers and vLLM take them.
    `decode` gives exactly the tokens' bytes (no clean-up of spaces), less one leading space where the tokenizer puts
    one before every text; streams keep that space, since an answer continues its prompt. Bytes that are no UTF-8 show
    as one U+FFFD each maximal broken part.

    What stands before and behind a text (BOS, [gMASK]<sop>) is what tokenizer.json's post-processor adds, unless
    tokenizer_config.json has add_bos_token or add_eos_token: then these decide, as in transformers 4. transformers 5.17
    and 5.24 drop both flags where there is a tokenizer.json, so that DeepSeek V2 to V3.1, whose post-processor adds
    nothing, would lose the BOS that their configs ask for and that they were trained with; SGLang puts it back too.
    A text that already begins with what would be added gets none: a rendered chat that is sent as a raw prompt.
    """

    def __init__(self, backend: Backend, config: dict[str, Any]) -> None:
        backend.no_truncation()
        backend.no_padding()
        mark_special_tokens(backend, config)
        self._backend = backend
        self.special_tokens = {name: text for name in SPECIAL_NAMES if (text := token_text(config.get(name)))}
        self.chat_template: str | None = template_source(config.get("chat_template"))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        table = token_table(part_json(backend.decoder), backend.get_vocab(), added)
        self.token_bytes = table.token_bytes  # by id; b"" for ids that no token has
        self.token_texts = table.token_texts  # by id; None where the bytes alone are no whole text
        self.strips_first_space = table.strips_first_space
        self.vocab_size = len(self.token_bytes)  # one past the largest id
        self.longest_token_bytes = max(map(len, self.token_bytes))
        shrinks = may_shrink(part_json(backend.normalizer)) or any(
            entry.lstrip or entry.rstrip for entry in added.values()
        )
        self._shrink_factor = 8 if shrinks else 1  # by how much a text may get shorter before it is cut into tokens
        self.bos_id = self.id_of(self.special_tokens.get("bos_token"))
        self.eos_id = self.id_of(self.special_tokens.get("eos_token"))
        self._before, self._after = self._ends(config)

    def _ends(self, config: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The ids put before and behind a text; every kind of post-processor puts the same ones around all texts."""
        if "add_bos_token" in config or "add_eos_token" in config:
            before, after = bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))
            bos, eos = ([] if token is None else [token] for token in (self.bos_id, self.eos_id))
            return bos if before else [], eos if after else []
        plain, whole = (self._backend.encode(PROBE, add_special_tokens=special).ids for special in (False, True))
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return whole[:at], whole[at + len(plain) :]
        raise CheckpointError(
            f"tokenizer.json: its post-processor makes {whole} of {plain}, supported: ids around them"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens` also those that the tokenizer puts around one, such as BOS."""
        # A batch of one: unlike `encode` it lets other threads run, so a long text does not hold up the streams.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens:
            return ids
        before = [] if ids[: len(self._before)] == self._before else self._before
        return [*before, *ids, *self._after]

    def continuation(self, text: str) -> list[int]:
        """Ids of a text that stands behind other text: without the space some tokenizers put before a first word."""
        anchor = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The whole text of some ids. Raises InvalidRequest for an id that is no token's."""
        parts = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest("token_ids", token, f"ids from 0 to {self.vocab_size - 1}")
            if not (skip_special_tokens and token in self.special_ids):
                parts.append(self.token_bytes[token])
        text = b"".join(parts).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_text(self, token: int) -> str:
        """One token alone, special or not; bytes that are no whole character show as U+FFFD."""
        if not 0 <= token < self.vocab_size:
            return ""
        text = self.token_texts[token]
        return self.token_bytes[token].decode("utf-8", "replace") if text is None else text

    def id_of(self, text: str | None) -> int | None:
        """Id of the token that is written so in the vocabulary; None where there is none."""
        return None if text is None else self._backend.token_to_id(text)

    def is_special(self, token: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out of the text."""
        return token in self.special_ids

    def over_limit(self, text: str, limit_tokens: int) -> int | None:
        """At least how many tokens a text has, if that is surely over the limit; None if it must be encoded to know.

        The work is bounded by what it takes to pass the limit, not by the text. No token holds more than
        `longest_token_bytes` bytes; and where a beginning of the text has too many tokens already, the one that may
        cross the cut stands for at most that many of them.
        """
        floor_tokens = len(text) // (self._shrink_factor * self.longest_token_bytes)
        if floor_tokens > limit_tokens:
            return floor_tokens
        probe_characters = PROBE_GROWTH * limit_tokens
        while probe_characters < len(text):
            ids = self.encode(text[:probe_characters], add_special_tokens=False)
            if len(ids) - self.longest_token_bytes > limit_tokens:
                return len(ids) - self.longest_token_bytes
            probe_characters *= PROBE_GROWTH
        return None


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer, or None if it has no tokenizer files. Raises CheckpointError for a damaged file."""
    if not directory.is_dir():
        raise CheckpointError(f"tokenizer: {directory} is not a directory")
    config = {**read_json(directory / "special_tokens_map.json"), **read_json(directory / "tokenizer_config.json")}
    template = directory / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    backend = load_backend(directory, config)
    return None if backend is None else Tokenizer(backend, config)


def load_backend(directory: Path, config: dict[str, Any]) -> Backend | None:
    """The tokenizer itself from whichever files there are, newest form first."""
    path = directory / "tokenizer.json"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif is_ranks_file(directory / "tokenizer.model"):
        return read_ranks(directory / "tokenizer.model", config)
    elif any((directory / name).is_file() for name in OLD_FILES):
        text = convert_old_files(directory)
    else:
        return None
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer that can be read: {error}") from error


def read_eos_ids(directory: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """All ids that end a text: those of generation_config.json, of config.json, and the tokenizer's own eos token.

    A chat model has several (end of text, the next role's mark), and no one file is sure to name them all: GLM's
    tokenizers name one of three. Raises CheckpointError for an entry that is no id.
    """
    found: set[int] = set()
    config = read_json(directory / "config.json")
    nested = config.get("text_config")  # of a model that also sees
    for name, part in (
        ("generation_config.json", read_json(directory / "generation_config.json")),
        ("config.json", config),
        ("config.json: text_config", nested if isinstance(nested, dict) else {}),
    ):
        given = part.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise CheckpointError(
                    f"{directory / name}: eos_token_id is {given!r}, expected: an id or a list of ids"
                )
        found.update(ids)
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return tuple(sorted(found))


def convert_old_files(directory: Path) -> str:
    """The text of a tokenizer.json made from older files, by transformers in a process of its own."""
    script = Path(__file__).with_name("convert.py")
    command = [sys.executable, "-P", str(script), str(directory)]  # -P: this folder's modules must not hide others
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{directory}: converting the tokenizer took over {CONVERSION_TIMEOUT_S:g} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(f"{directory}: no tokenizer.json, and its older tokenizer files do not convert: {reason}")
    return done.stdout


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none. Raises CheckpointError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def mark_special_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Add what only tokenizer_config.json names, and mark the named tokens (bos, eos, ...) special."""
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if isinstance(entry, dict) and entry["content"] not in known:
            flags = {name: bool(entry[name]) for name in ("lstrip", "rstrip", "normalized") if name in entry}
            add = backend.add_special_tokens if entry.get("special") else backend.add_tokens
            add([AddedToken(entry["content"], special=bool(entry.get("special")), **flags)])
            known.add(entry["content"])
    named = [token_text(config.get(name)) for name in SPECIAL_NAMES]
    for text in named:
        if text and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([text])


def part_json(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer (its decoder, its normalizer) as tokenizer.json writes it; None where it has none.

    Parts give their JSON when pickled; that of the whole tokenizer would take a second with a large vocabulary.
    """
    return None if part is None else json.loads(part.__getstate__())


def may_shrink(normalizer: dict[str, Any] | None) -> bool:
    """Whether a text can have far fewer bytes behind this normalizer."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return False
    if normalizer["type"] == "Sequence":
        return any(map(may_shrink, normalizer["normalizers"]))
    pattern = normalizer.get("pattern", {}).get("String", "")
    return normalizer["type"] != "Replace" or not 0 < len(pattern) <= len(normalizer["content"])


def token_text(entry: object) -> str | None:
    """The text of a special token as the files write it: a string, or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def template_source(entry: object) -> str | None:
    """The chat template as the files write it: a string, or a list of named ones, of which `default` counts."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default", next(iter(named.values()), None))
    return entry if isinstance(entry, str) else None
