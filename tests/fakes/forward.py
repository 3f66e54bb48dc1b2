"""All logits of a prompt through the real decoder and a paged cache, without engine or sampler."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.paged import Chunks, Paged
from jaxserve.models.decoder import SplitDecoder
from jaxserve.models.spec import ModelSpec
from pallas_kernels.device import Device

PAGE_TOKENS = 16


class PagedForward:
    """One compiled chunk of `width` tokens; prompts are cut into chunks of at most `chunk_tokens` and padded to it."""

    def __init__(self, split: SplitDecoder, spec: ModelSpec, leaves: Sequence[jax.Array], width: int) -> None:
        self.spec, self.leaves, self.width = spec, list(leaves), width
        self.num_pages = 2 * -(-width // PAGE_TOKENS) + 8
        self.table = np.random.default_rng(0).permutation(self.num_pages)  # any order of pages

        @jax.jit
        def forward(leaves, caches, token_T, position_T, page_T, count):  # noqa: ANN001, ANN202
            chunk = Chunks(jnp.asarray(self.table)[None], jnp.zeros(1, int), count[None], position_T[:1])
            nobody = jnp.zeros((1, len(self.table)), jnp.int32), jnp.zeros(1, jnp.int32)
            paged = Paged(Device("cpu"), "auto", page_T, position_T % PAGE_TOKENS, *nobody, chunk)
            model = split.merge(leaves)
            hidden, caches = model(token_T, position_T, caches, paged)
            return model.logits(hidden), caches

        self.forward = forward

    def logits(self, tokens: Sequence[int], chunk_tokens: int | None = None) -> np.ndarray:
        """float32 [tokens, V]; the cache is full of NaN to begin with."""
        shapes = self.spec.attention.cache_shapes(self.num_pages, PAGE_TOKENS)
        dtype = self.leaves[0].dtype
        caches = [tuple(jnp.full(shape, jnp.nan, dtype) for shape in shapes)] * self.spec.num_layers
        step = chunk_tokens or self.width
        out = []
        for first in range(0, len(tokens), step):
            count = min(step, len(tokens) - first)
            token_T, position_T = np.zeros(self.width, np.int32), np.zeros(self.width, np.int32)
            page_T = np.full(self.width, self.num_pages, np.int32)
            token_T[:count] = tokens[first : first + count]
            position_T[:count] = np.arange(first, first + count)
            page_T[:count] = self.table[position_T[:count] // PAGE_TOKENS]
            logits, caches = self.forward(self.leaves, caches, token_T, position_T, page_T, np.int32(count))
            out.append(np.asarray(logits)[:count])
        return np.concatenate(out)
