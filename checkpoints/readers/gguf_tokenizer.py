"""Takes the tokenizer in a GGUF file's metadata; gives Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from checkpoints.readers.reader import write_json
from jaxserve.errors import CheckpointError, ModelError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types of the format
SPACE = "▁"  # as SentencePiece writes it

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2_words() -> PreTokenizer:
    """GPT-2's words."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def single_digits() -> PreTokenizer:
    """GPT-2's words, and each digit alone."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words()])


def llama3_words() -> PreTokenizer:
    """Llama 3's words, with up to three digits together."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {  # tokenizer.ggml.pre -> how a text is cut before merging
    "default": gpt2_words,
    "gpt-2": gpt2_words,
    "smollm": single_digits,
    "llama-bpe": llama3_words,
}


Builder = Callable[[Path, Mapping[str, Any], dict[str, int]], Tokenizer]


def write_tokenizer(path: Path, metadata: Mapping[str, Any], target: Path) -> None:
    """Write both files into the directory `target`; nothing where the GGUF file has no tokenizer.

    Raises ModelError for a kind that is not in the tables, CheckpointError for a damaged vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return
    builders = {"gpt2": byte_level, "llama": sentence_piece}
    if kind not in builders:
        raise ModelError(f"{path}: tokenizer.ggml.model is {kind!r}, supported: {', '.join(builders)}")
    build_tokenizer(path, metadata, builders[kind]).save(str(target / "tokenizer.json"))
    write_json(target / "tokenizer_config.json", tokenizer_config(metadata))


def build_tokenizer(path: Path, metadata: Mapping[str, Any], build: Builder) -> Tokenizer:
    """The vocabulary's own model, and what all kinds have: special tokens, and bos at the start of a text."""
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens names a token twice, or has not one type a token")
    tokenizer = build(path, metadata, vocabulary)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    bos = token_named(metadata, "bos")
    if bos is not None and adds_bos(metadata):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def byte_level(path: Path, metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """BPE over bytes, as GPT-2's: merges are in the file."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{path}: tokenizer.ggml.pre is {pre!r}, supported: {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(path: Path, metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2's: neighbours merge to the token of the best score; rare bytes stand alone."""
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(vocabulary):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary)} tokens")
    splits = [
        (-score, vocabulary[token[:at]], vocabulary[token[at:]], token[:at], token[at:])
        for token, score in zip(vocabulary, scores, strict=True)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    merges = [(left, right) for *_, left, right in sorted(splits)]
    unknown = token_named(metadata, "unknown")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*plain, *strip])
    return tokenizer


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a text starts with the bos token. Where the file does not say, Llama 2's and 3's do."""
    usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def token_named(metadata: Mapping[str, Any], key: str) -> str | None:
    """The text of `tokenizer.ggml.<key>_token_id`; None where there is none."""
    token = metadata.get(f"tokenizer.ggml.{key}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    return tokens[token] if token is not None and 0 <= token < len(tokens) else None


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer.json does not hold: the roles of special tokens, and the chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = token_named(metadata, key)
        if text is not None:
            config[f"{name}_token"] = text
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config
