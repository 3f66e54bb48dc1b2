"""Small tokenizers made in place for tests that need text: a byte-level BPE, and a metaspace one as Llama 2 has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = (
    "The capital of France is Paris. What is the capital of Germany? The capital of Germany is Berlin.\n"
    "Once upon a time there was a small cat who lived near the sea. The cat said hello to the world, hello again.\n"
    "Stop here, please. One two three four five six seven eight nine ten. 0 1 2 3 4 5 6 7 8 9 10 11 12.\n"
    "Ein schöner Tag in Köln, une journée à Paris, 東京は今日も晴れ、杭州欢迎你。 😀 🚀\n"
) * 4

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>"]  # ids 0 to 3

CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def tiny_tokenizer_dir(path: Path, vocab_size: int = 512, **config: Any) -> Path:
    """A byte-level BPE of at most `vocab_size` ids with a chat template; `config` adds to tokenizer_config.json.

    Ids 0 to 3 are SPECIAL_TOKENS; eos is <|im_end|> (id 2); no BOS is added unless `config` says add_bos_token.
    Returns `path`.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    entries = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    return save(backend, path, {**entries, **config})


def tiny_metaspace_dir(path: Path, **config: Any) -> Path:
    """A tokenizer as Llama 2 has it: <unk> <s> </s>, 256 byte tokens, U+2581 for spaces, and <s> before each text."""
    words = ["hello", "world", "cat", "the"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for character in "\u2581" + "abcdefghijklmnopqrstuvwxyz" + ".,!":
        vocabulary[character] = len(vocabulary)
    for word in [*words, *("\u2581" + word for word in words)]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(backend, path, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config})


def save(backend: Tokenizer, path: Path, config: dict[str, Any]) -> Path:
    """Write the two files that a model's directory has."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return path
