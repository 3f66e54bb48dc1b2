"""Train the demo model's tokenizer on its corpus: python -m demo_model.tokenizer --wordnet FOLDER.

Byte-level BPE (arXiv 1508.07909 over bytes) as DeepSeek-V3's, with its pre-tokenizer but for digits, which stand one
by one: sums are then done digit by digit. The special tokens' strings are DeepSeek's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.corpus.document import (
    BOS,
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    EOS,
    SEPARATOR,
    TEMPLATE,
    Renderer,
)
from demo_model.corpus.mix import TRAIN, documents
from demo_model.corpus.pack import OUTPUT_BEGIN, OUTPUT_END

FOLDER = Path(__file__).resolve().parents[1] / "checkpoints" / "demo"
VOCABULARY, DOCUMENTS, MIN_COUNT = 8192, 60_000, 3
CONTROL = (BOS, EOS, "<\uff5c\u2581pad\u2581\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
TOOLS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, OUTPUT_BEGIN, OUTPUT_END)
THINKING = ("<think>", "</think>")  # shown to the user as text, so not special
WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXTRA = (  # text that the corpus does not hold, so that any English can be written
    "the quick brown fox jumps over the lazy dog because computers, servers and programs process language models "
    "quickly while people read newspapers, travel between cities, study science and history, and cook dinner"
)


def train(wordnet_folder: Path, seed: int = 1) -> Tokenizer:
    """On the first documents of the training split. Deterministic."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL + TOOLS]
    special += [AddedToken(text, special=False, normalized=False) for text in THINKING]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=MIN_COUNT,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    render = Renderer()
    texts = [render(document) for document in documents(TRAIN, seed, 0, DOCUMENTS, wordnet_folder)]
    for text in CONTROL + TOOLS + THINKING:
        texts = [each.replace(text, "\n") for each in texts]
    tokenizer.train_from_iterator([*texts, *[EXTRA] * MIN_COUNT], trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 1024,
        "pad_token": CONTROL[2],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where the files go")
    parser.add_argument("--wordnet", type=Path, required=True, help="what python -m demo_model.corpus.wordnet fetched")
    args = parser.parse_args()
    tokenizer = train(args.wordnet)
    write(tokenizer, args.folder)
    print(f"{tokenizer.get_vocab_size()} ids in {args.folder}")


if __name__ == "__main__":
    main()
