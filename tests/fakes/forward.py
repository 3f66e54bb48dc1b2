"""All logits of some sequences through the real decoder and a paged cache, without engine or sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.layers.paged import Chunks, Paged
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import SplitDecoder
from pallas_kernels.device import Device

PAGE_TOKENS = 16
SEQUENCES = 4  # that may be in the cache together
EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in one step: a chunk of its prompt, or one token that takes the decode path."""

    sequence: int
    start: int
    tokens: Sequence[int]
    decodes: bool = False


class PagedForward:
    """One compiled mixed step of `width` tokens; the cache is full of NaN to begin with, its pages in any order.

    On a mesh with a data axis all lanes do the same, each with pages of its own.
    """

    def __init__(
        self, split: SplitDecoder, leaves: Sequence[jax.Array], width: int, mesh: Mesh | None = None, longest: int = 128
    ) -> None:
        self.split, self.leaves, self.width = split, list(leaves), width
        self.mesh = mesh or make_mesh(jax.devices()[:1])
        pages = -(-longest // PAGE_TOKENS)
        self.num_pages = SEQUENCES * pages + 3
        order = np.random.default_rng(0).permutation(self.num_pages)
        self.table_RM = order[: SEQUENCES * pages].reshape(SEQUENCES, pages).astype(np.int32)
        self.caches = self.empty()
        self.forward = jax.jit(self.on_mesh())

    def empty(self) -> list[tuple[jax.Array, ...]]:
        """Caches of NaN."""
        attention = self.split.spec.attention
        shapes = attention.cache_shapes(self.num_pages * self.split.placement.data, PAGE_TOKENS)
        dtype = jnp.bfloat16 if any(leaf.dtype == jnp.bfloat16 for leaf in self.leaves) else jnp.float32
        layer = tuple(jnp.full(shape, jnp.nan, dtype) for shape in shapes)
        return [layer] * self.split.spec.num_layers

    def on_mesh(self):  # noqa: ANN201
        """The step as each device runs it."""
        split, attention = self.split, self.split.spec.attention

        def forward(leaves, caches, token_T, position_T, page_T, row_B, chunks):  # noqa: ANN001, ANN202
            table_BM, length_B = row_B
            live_T = page_T < self.num_pages
            paged = Paged(
                Device("cpu"), "auto", live_T, page_T, position_T % PAGE_TOKENS, table_BM, length_B, Chunks(*chunks)
            )
            model = split.merge(leaves)
            hidden, caches = model(token_T, position_T, caches, paged)
            return model.logits(hidden), caches

        if self.mesh.size == 1:
            return forward
        shapes = attention.cache_shapes(self.num_pages * split.placement.data, PAGE_TOKENS)
        layer = tuple(split.placement.spec(attention.cache_axes(), shape) for shape in shapes)
        caches = [layer] * split.spec.num_layers
        vocab = split.placement.spec((None, "vocab"), (1, split.spec.vocab_size))
        leaves = [leaf.sharding.spec for leaf in split.leaves]
        in_specs = (leaves, caches, EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE)
        return jax.shard_map(forward, mesh=self.mesh, in_specs=in_specs, out_specs=(vocab, caches), check_vma=False)

    def step(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Logits of each piece's tokens, float32 [tokens, V]; decoding pieces must come first."""
        token_T, position_T = np.zeros(self.width, np.int32), np.zeros(self.width, np.int32)
        page_T = np.full(self.width, self.num_pages, np.int32)
        table_BM, length_B = np.zeros_like(self.table_RM), np.zeros(SEQUENCES, np.int32)
        chunks = np.zeros((3, SEQUENCES), np.int32)  # start, tokens, position
        chunk_table_RM = np.zeros_like(self.table_RM)
        at = 0
        for row, piece in enumerate(pieces):
            end, table_M = at + len(piece.tokens), self.table_RM[piece.sequence]
            token_T[at:end] = piece.tokens
            position_T[at:end] = piece.start + np.arange(len(piece.tokens))
            page_T[at:end] = table_M[position_T[at:end] // PAGE_TOKENS]
            if piece.decodes:
                table_BM[row], length_B[row] = table_M, piece.start + 1
            else:
                chunk_table_RM[row] = table_M
                chunks[:, row] = at, len(piece.tokens), piece.start
            at = end
        rows = (table_BM, length_B)
        logits, self.caches = self.forward(
            self.leaves, self.caches, token_T, position_T, page_T, rows, (chunk_table_RM, *chunks)
        )
        ends = np.cumsum([len(piece.tokens) for piece in pieces])
        return np.split(np.asarray(logits), ends)[:-1]

    def logits(
        self, tokens: Sequence[int], chunk_tokens: int | None = None, decode_from: int | None = None
    ) -> np.ndarray:
        """float32 [tokens, V] of one sequence in an empty cache: prompt chunks, then one token a step."""
        self.caches = self.empty()
        stop = len(tokens) if decode_from is None else decode_from
        size = chunk_tokens or self.width
        pieces = [Piece(0, at, tokens[at : min(at + size, stop)]) for at in range(0, stop, size)]
        pieces += [Piece(0, at, tokens[at : at + 1], decodes=True) for at in range(stop, len(tokens))]
        return np.concatenate([self.step([piece])[0] for piece in pieces])

    def together(self, sequences: Sequence[Sequence[int]], chunk_tokens: int = 7) -> list[np.ndarray]:
        """All sequences at once: each step takes a decode token of those past their first chunk and a chunk of one."""
        self.caches = self.empty()
        done = [0] * len(sequences)
        found: list[list[np.ndarray]] = [[] for _ in sequences]
        while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
            pieces = []
            for i, tokens in enumerate(sequences):
                if 0 < done[i] < len(tokens) and len(tokens) - done[i] != chunk_tokens:
                    pieces.append(Piece(i, done[i], tokens[done[i] : done[i] + 1], decodes=True))
            starting = [i for i, count in enumerate(done) if count == 0][:1]
            pieces += [Piece(i, 0, sequences[i][:chunk_tokens]) for i in starting]
            last = [i for i, count in enumerate(done) if count and len(sequences[i]) - count == chunk_tokens]
            pieces += [Piece(i, done[i], sequences[i][done[i] :]) for i in last]  # a chunk over a cached prefix
            for piece, part in zip(pieces, self.step(pieces), strict=True):
                found[piece.sequence].append(part)
                done[piece.sequence] += len(piece.tokens)
        return [np.concatenate(parts) for parts in found]
