"""Documents -> rows of tokens of one length, made in several processes; the same whatever their number."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_model.corpus.document import EOS, Renderer
from demo_model.corpus.mix import documents

BLOCK_ROWS = 128  # that are packed together: each block has documents of its own
WAITING = 64  # documents, among which the longest that fits goes next
BATCH_DOCUMENTS = 256  # made and tokenised at a time
OUTPUT_BEGIN, OUTPUT_END = "<\uff5ctool\u2581output\u2581begin\uff5c>", "<\uff5ctool\u2581output\u2581end\uff5c>"


def token_rows(
    tokenizer_path: Path,
    split: str,
    seed: int,
    rows: int,
    row_tokens: int,
    processes: int,
    wordnet_folder: Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """uint16 ids [rows, row_tokens] and uint8 of the same shape, 1 where a token is a target.

    A row holds whole documents, each from BOS to EOS, and EOS as padding at its end. No target are padding, what tools
    gave back and BOS. `wordnet_folder`: see `documents`. A document longer than a row is left out.
    """
    blocks = range(-(-rows // BLOCK_ROWS))
    make = partial(block_rows, str(tokenizer_path), split, seed, row_tokens, wordnet_folder)
    if processes > 1:
        context = multiprocessing.get_context("spawn")  # a fork would inherit JAX's threads
        with ProcessPoolExecutor(min(processes, len(blocks)), context) as pool:
            made = list(pool.map(make, blocks))
    else:
        made = [make(block) for block in blocks]
    ids, targets = (np.concatenate(parts)[:rows] for parts in zip(*made, strict=True))
    return ids, targets


def block_rows(
    tokenizer_path: str, split: str, seed: int, row_tokens: int, wordnet_folder: Path | None, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """One block: it takes documents from its own part of the split until its rows are full."""
    tokenizer = Tokenizer.from_file(tokenizer_path)
    source = encoded(tokenizer, split, seed, wordnet_folder, block)
    end = tokenizer.token_to_id(EOS)
    ids = np.full((BLOCK_ROWS, row_tokens), end, np.uint16)
    targets = np.zeros((BLOCK_ROWS, row_tokens), np.uint8)
    waiting = [next(source) for _ in range(WAITING)]
    for row in range(BLOCK_ROWS):
        at = 0
        while True:
            fits = [n for n, (tokens, _) in enumerate(waiting) if len(tokens) <= row_tokens - at]
            if not fits:
                break
            # the one that has waited longest, but towards the end of a row the longest that still fits
            best = fits[0] if row_tokens - at > row_tokens // 4 else max(fits, key=lambda n: len(waiting[n][0]))
            tokens, counts = waiting.pop(best)
            ids[row, at : at + len(tokens)], targets[row, at : at + len(tokens)] = tokens, counts
            at += len(tokens)
            waiting.append(next(source))
        waiting = [one for one in waiting if len(one[0]) <= row_tokens] or [next(source) for _ in range(WAITING)]
    return ids, targets


def encoded(
    tokenizer: Tokenizer, split: str, seed: int, wordnet_folder: Path | None, block: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Tokens of a block's documents, and which are targets."""
    render = Renderer()
    begin, end = (tokenizer.token_to_id(text) for text in (OUTPUT_BEGIN, OUTPUT_END))
    start = block << 20  # no block needs a million documents
    while True:
        texts = [render(document) for document in documents(split, seed, start, BATCH_DOCUMENTS, wordnet_folder)]
        start += BATCH_DOCUMENTS
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids, target_tokens(np.asarray(encoding.ids), begin, end)


def target_tokens(ids: np.ndarray, begin: int, end: int) -> np.ndarray:
    """uint8: 0 for BOS and from the begin of a tool's output to its end."""
    inside = np.cumsum(ids == begin) - np.cumsum(ids == end) + (ids == end)
    targets = (inside == 0).astype(np.uint8)
    targets[0] = 0
    return targets
