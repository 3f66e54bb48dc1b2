"""Our part of check_parity: all logits of some sequences through the real decoder, paged cache and kernels.

The engine's programs give samples, not logits; these two are built like its mixed and decode steps and end in the head.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.source import open_model
from jaxserve.layers.paged import Cache, Chunks, Paged
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import SplitDecoder, split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.compile import compile_all
from jaxserve.runtime.weights import load_weights
from pallas_kernels.device import device_of

PAGE_TOKENS = 64
MOST_DECODED = 24  # tokens at a sequence's end that take the decode path


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the programs."""

    rows: int  # that may decode, and chunks: sequences at most
    width: int = 384  # packed tokens of a mixed step
    chunk_tokens: int = 200  # no multiple of a page


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence in one step: a chunk of its prompt, or one token that takes the decode path."""

    sequence: int
    start: int
    tokens: int
    decodes: bool


class Rows(NamedTuple):
    """The packed rows of a step, int32 each; see Paged. chunks: the fields of Chunks, None in a pure decode step."""

    token_T: jax.Array
    position_T: jax.Array
    page_T: jax.Array
    table_BM: jax.Array
    length_B: jax.Array
    chunks: tuple[jax.Array, ...] | None


def plan(lengths: Sequence[int], sizes: Sizes) -> list[list[Piece]]:
    """The pieces of each step, those that decode first: prompts in chunks beside whatever decodes already."""
    ends = [length - min(MOST_DECODED, length // 2) for length in lengths]  # of the prompts
    done = [0] * len(lengths)
    steps = []
    while list(lengths) != done:
        decoding = [i for i, length in enumerate(lengths) if ends[i] <= done[i] < length]
        pieces, room = [Piece(i, done[i], 1, decodes=True) for i in decoding], sizes.width - len(decoding)
        for i, end in enumerate(ends):
            if tokens := min(sizes.chunk_tokens, room, max(end - done[i], 0)):
                pieces.append(Piece(i, done[i], tokens, decodes=False))
                room -= tokens
        for piece in pieces:
            done[piece.sequence] += piece.tokens
        steps.append(pieces)
    return steps


class Forward:
    """The steps, once compiled. The cache is full of NaN to begin with, its pages in any order."""

    def __init__(
        self, split: SplitDecoder, leaves: Sequence[jax.Array], longest: int, columns: np.ndarray, sizes: Sizes
    ) -> None:
        self.split, self.leaves, self.sizes = split, list(leaves), sizes
        self.columns = jnp.asarray(columns, jnp.int32)
        self.device = device_of(jax.devices()[0])
        pages = -(-longest // PAGE_TOKENS)
        self.num_pages = sizes.rows * pages + 3
        order = np.random.default_rng(0).permutation(self.num_pages)
        self.table_RM = order[: sizes.rows * pages].reshape(sizes.rows, pages).astype(np.int32)
        shapes = split.spec.attention.cache_shapes(self.num_pages, PAGE_TOKENS)
        dtype = next(leaf.dtype for name, leaf in zip(split.names, leaves, strict=True) if name == "embed.weight")
        self.caches = [tuple(jnp.full(shape, jnp.nan, dtype) for shape in shapes) for _ in range(split.spec.num_layers)]
        self.programs: dict[str, jax.stages.Compiled] = {}

    def lowerings(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """What makes each program."""
        return {name: functools.partial(self.lowered, name) for name in ("mixed", "decode")}

    def compile(self) -> Self:
        """Compiles them all."""
        lowerings = self.lowerings()
        self.programs = compile_all(lowerings, len(lowerings), lambda *_: None)
        return self

    def lowered(self, name: str) -> jax.stages.Lowered:
        """A program for rows as `pack` makes them."""
        jitted = jax.jit(self.forward, donate_argnums=1)
        return jitted.lower(self.leaves, self.caches, self.columns, self.pack([], name == "decode"))

    def native_kernels(self) -> dict[str, int]:
        """How often each program calls one of our own kernels; 0 where XLA forms run."""
        target = re.compile(r'custom_call_target="\w*mosaic\w*"')
        return {name: len(target.findall(program.as_text() or "")) for name, program in self.programs.items()}

    def forward(
        self, leaves: list[jax.Array], caches: list[Cache], columns: jax.Array, rows: Rows
    ) -> tuple[tuple[jax.Array, ...], list[Cache]]:
        """What is kept of the logits, and the caches; kernels are chosen as the engine chooses them."""
        paged = Paged(
            self.device,
            "auto",
            live_T=rows.page_T < self.num_pages,
            page_T=rows.page_T,
            offset_T=rows.position_T % PAGE_TOKENS,
            table_BM=rows.table_BM,
            length_B=rows.length_B,
            chunks=None if rows.chunks is None else Chunks(*rows.chunks),
        )
        model = self.split.merge(leaves)
        hidden_TD, caches = model(rows.token_T, rows.position_T, caches, paged)
        logits_TV = model.logits(hidden_TD)
        return self.kept(logits_TV, columns), caches

    def kept(self, logits_TV: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
        """What a step gives of its logits."""
        return logits_TV[:, columns], jnp.argmax(logits_TV, 1), jnp.abs(logits_TV).max(1)

    def pack(self, pieces: Sequence[tuple[Piece, np.ndarray]], is_decode: bool) -> Rows:
        """The rows of a step that feeds these pieces, each with its tokens."""
        rows, width = self.sizes.rows, self.sizes.rows if is_decode else self.sizes.width
        token_T, position_T = np.zeros(width, np.int32), np.zeros(width, np.int32)
        page_T = np.full(width, self.num_pages, np.int32)  # of padding: written nowhere
        table_BM, length_B = np.zeros_like(self.table_RM), np.zeros(rows, np.int32)
        chunk_table_RM, chunks = np.zeros_like(self.table_RM), np.zeros((3, rows), np.int32)  # start, tokens, position
        at = 0
        for row, (piece, ids) in enumerate(pieces):
            end, table_M = at + piece.tokens, self.table_RM[piece.sequence]
            token_T[at:end], position_T[at:end] = ids, piece.start + np.arange(piece.tokens)
            page_T[at:end] = table_M[position_T[at:end] // PAGE_TOKENS]
            if piece.decodes:
                table_BM[row], length_B[row] = table_M, piece.start + 1
            else:
                chunk_table_RM[row], chunks[:, row] = table_M, (at, piece.tokens, piece.start)
            at = end
        per_chunk = None if is_decode else tuple(map(jnp.asarray, (chunk_table_RM, *chunks)))
        token_T, position_T, page_T, table_BM, length_B = map(
            jnp.asarray, (token_T, position_T, page_T, table_BM, length_B)
        )
        return Rows(token_T, position_T, page_T, table_BM, length_B, per_chunk)

    def step(self, pieces: Sequence[tuple[Piece, np.ndarray]]) -> list[tuple[np.ndarray, ...]]:
        """Of each piece, what is kept of its tokens' logits."""
        is_decode = all(piece.decodes for piece, _ in pieces)
        program = self.programs["decode" if is_decode else "mixed"]
        kept, self.caches = program(self.leaves, self.caches, self.columns, self.pack(pieces, is_decode))
        ends = np.cumsum([piece.tokens for piece, _ in pieces])
        return list(zip(*(np.split(np.asarray(part), ends)[:-1] for part in kept), strict=True))


def all_logits(forward: Forward, sequences: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Of sequence i, `values_i`, `argmax_i` and `largest_i` as in reference.npz, and `decoded_i`, bool: which tokens
    took the decode path."""
    found: list[list[tuple[np.ndarray, ...]]] = [[] for _ in sequences]
    for pieces in plan([len(ids) for ids in sequences], forward.sizes):
        fed = [(piece, sequences[piece.sequence][piece.start : piece.start + piece.tokens]) for piece in pieces]
        for piece, kept in zip(pieces, forward.step(fed), strict=True):
            found[piece.sequence].append((*kept, np.full(piece.tokens, piece.decodes)))
    names = ("values", "argmax", "largest", "decoded")
    return {
        f"{name}_{i}": np.concatenate(parts)
        for i, pieces in enumerate(found)
        for name, parts in zip(names, zip(*pieces, strict=True), strict=True)
    }


def our_logits(
    folder: Path, dtype: str, sequences: Sequence[np.ndarray], columns: np.ndarray, sizes: Sizes
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The folder's model as the runtime loads it, on the first device: `all_logits`, and what the run was."""
    start_s = time.monotonic()
    source, mesh = open_model(folder), make_mesh(jax.devices()[:1])
    split = split_decoder(model_spec(source.config), jnp.dtype(dtype), mesh)
    leaves = jax.block_until_ready(load_weights(split, source.load))
    loaded_s = time.monotonic()
    forward = Forward(split, leaves, max(map(len, sequences)), columns, sizes).compile()
    compiled_s = time.monotonic()
    found = all_logits(forward, sequences)
    seconds = {"load": loaded_s - start_s, "compile": compiled_s - loaded_s, "run": time.monotonic() - compiled_s}
    seconds = {name: round(taken_s, 1) for name, taken_s in seconds.items()}
    return found, {"native_kernels": forward.native_kernels(), "seconds": seconds}
