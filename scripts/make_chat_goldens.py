#!/usr/bin/env python3
"""Make tests/goldens/chat anew: what transformers' tokenizers and chat templates give for the cases of _chat_cases.

It takes the transformers of the environment that runs it; the committed files are made with the pinned version. (5.24
gives the same, but for assistants' messages whose content is null: it drops the field, and DeepSeek's templates, which
ask whether it is none, then fail.) A golden holds, for one model:
  vocab_size       one past the largest id
  token_digest     SHA-256 of the texts of all single ids, joined by U+0000
  special_ids      first and last id of each run of ids that skip_special_tokens leaves out
  loaded, flagged  ids of RAW as the tokenizer is loaded, and with add_bos_token as tokenizer_config.json has it:
                   transformers 5 drops that flag wherever there is a tokenizer.json
  texts            ids of _chat_cases.ALL_TEXTS without those around them
  decoded          random ids that make broken characters, their text, and the same without special tokens
  chats            ids by case; null where the template fails, or prints a list or None as Python would
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from scripts._chat_cases import ALL_TEXTS, CHATS, RAW, Chat  # noqa: E402
from scripts.fetch_tokenizers import SOURCES, fetch  # noqa: E402

VERSION = "5.17.0"
GOLDENS = ROOT / "tests" / "goldens" / "chat"
# Without those that have template and vocabulary of another one here.
MODELS = [name for name in SOURCES if name not in ("glm-4-9b-0414", "glm-z1-9b-0414", "glm-4.6v-flash")]
DECODED_SEQUENCES, DECODED_TOKENS = 12, 24


def golden(directory: Path) -> dict[str, Any]:
    """All that is kept of one model."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    size = len(tokenizer)
    added = tokenizer.added_tokens_decoder
    special = sorted(token for token, entry in added.items() if entry.special)
    singles = tokenizer.batch_decode([[token] for token in range(size)])
    made: dict[str, Any] = {
        "vocab_size": size,
        "token_digest": hashlib.sha256("\0".join(singles).encode()).hexdigest(),
        "special_ids": runs(special),
        "loaded": tokenizer(RAW)["input_ids"],
        "texts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ALL_TEXTS],
        "decoded": [decoded(tokenizer, ids) for ids in random_ids(singles, sorted(added))],
    }
    if tokenizer.chat_template:
        made["chats"] = {name: rendered(tokenizer, chat) for name, chat in CHATS.items()}
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "add_bos_token" in config:
        tokenizer.add_bos_token = config["add_bos_token"]
    made["flagged"] = tokenizer(RAW)["input_ids"]
    return made


def runs(ids: list[int]) -> list[list[int]]:
    """First and last of each run of consecutive ids."""
    found: list[list[int]] = []
    for token in ids:
        if found and found[-1][1] == token - 1:
            found[-1][1] = token
        else:
            found.append([token, token])
    return found


def random_ids(singles: list[str], added: list[int]) -> list[list[int]]:
    """Sequences that no text encodes to: parts of characters in wrong orders, with added tokens between them."""
    draw = random.Random(len(singles))
    parts = [token for token, text in enumerate(singles) if "\ufffd" in text]
    choices = [parts, range(512), added]  # single bytes and short words lie at the beginning
    return [[draw.choice(draw.choice(choices)) for _ in range(DECODED_TOKENS)] for _ in range(DECODED_SEQUENCES)]


def decoded(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    """The text of some ids, with and without special tokens."""
    return {"ids": ids, "text": tokenizer.decode(ids), "skipped": tokenizer.decode(ids, skip_special_tokens=True)}


def rendered(tokenizer: Any, chat: Chat) -> list[int] | None:
    """The prompt's ids; None if the template has no answer for these messages."""
    values = {"tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt, **chat.template_kwargs}
    try:
        text = tokenizer.apply_chat_template(chat.messages, tokenize=False, **values)
    except (TemplateError, TypeError, AttributeError, KeyError, ValueError):
        return None
    if "'type': 'text'" in text or "None" in text:
        return None
    return tokenizer.apply_chat_template(chat.messages, tokenize=True, return_dict=False, **values)


def write(made: dict[str, Any], path: Path) -> None:
    """One line an entry of each part, so that a change shows what it changes."""
    lines = []
    for name, part in made.items():
        if isinstance(part, dict):
            entries = [f"{json.dumps(key)}: {compact(value)}" for key, value in part.items()]
            lines.append(f"{json.dumps(name)}: {{\n  " + ",\n  ".join(entries) + "\n }")
        elif name in ("texts", "decoded"):
            lines.append(f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(compact, part)) + "\n ]")
        else:
            lines.append(f"{json.dumps(name)}: {compact(part)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def main() -> int:
    """Write the goldens of the models asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=GOLDENS, help="folder to write to")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS, help="only these")
    options = parser.parse_args()
    if options.output == GOLDENS and transformers.__version__ != VERSION:
        parser.error(f"the committed goldens are made with transformers {VERSION}, this is {transformers.__version__}")
    options.output.mkdir(parents=True, exist_ok=True)
    directory = fetch()
    for name in options.model:
        print(name, flush=True)
        write(golden(directory / name), options.output / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
