"""Our fast path against our plain one: the same weights and ids, in bfloat16 with our kernels and in float32 without.

float32 chooses its ids greedily; bfloat16 is fed them. Both go through the paged cache in the same steps: chunks of
several prompts together, then all sequences in decode steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import random_weights
from scripts._parity_ours import Forward, Piece, Sizes

MARGIN = 0.15  # between the reference's two largest logits: below it the order may change
LIMIT = 0.05  # of the difference between logprobs of the reference's id


@dataclass(frozen=True, slots=True)
class Positions:
    """Of P prompts x S generated ids. forced_PS: the ids that were fed; the others belong to the place before each."""

    forced_PS: np.ndarray
    argmax_PS: np.ndarray
    margin_PS: np.ndarray  # between the two largest logits
    logprob_PS: np.ndarray  # of the forced id


class Scored(Forward):
    """Steps that keep of each row: the argmax, the margin to the second, log of the sum, and one id's logit."""

    def wanted(self, is_decode: bool) -> jax.Array:
        """Ids of a step's rows, of which nothing is known yet."""
        return jnp.zeros(self.sizes.rows if is_decode else self.sizes.width, jnp.int32)

    def lowered(self, name: str) -> jax.stages.Lowered:
        """As Forward's, with an id for each row in place of columns."""
        is_decode = name == "decode"
        jitted = jax.jit(self.forward, donate_argnums=1)
        return jitted.lower(self.leaves, self.caches, self.wanted(is_decode), self.pack([], is_decode))

    def kept(self, logits_TV: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
        """columns: an id for each row."""
        logits_TV = logits_TV.astype(jnp.float32)
        top_T2 = jax.lax.top_k(logits_TV, 2)[0]
        total_T = jax.nn.logsumexp(logits_TV, axis=1)
        chosen_T = jnp.take_along_axis(logits_TV, columns[:, None], axis=1)[:, 0]
        return jnp.argmax(logits_TV, 1), top_T2[:, 0] - top_T2[:, 1], chosen_T - total_T, top_T2[:, 0] - total_T

    def last_rows(self, pieces: Sequence[tuple[Piece, np.ndarray]], want: Sequence[int]) -> np.ndarray:
        """[pieces, 4]: what is kept of each piece's last token; want: the id after it."""
        is_decode = all(piece.decodes for piece, _ in pieces)
        ends = np.cumsum([piece.tokens for piece, _ in pieces])
        columns = np.array(self.wanted(is_decode))
        columns[ends - 1] = want
        program = self.programs["decode" if is_decode else "mixed"]
        kept, self.caches = program(self.leaves, self.caches, jnp.asarray(columns), self.pack(pieces, is_decode))
        return np.stack([np.asarray(part, np.float64)[ends - 1] for part in kept], axis=1)


def run(forward: Scored, prompts: Sequence[np.ndarray], tokens: int, forced_PS: np.ndarray | None) -> Positions:
    """Feeds the prompts and then `tokens` ids each: the given ones, or where there are none each place's argmax."""
    found = np.zeros((len(prompts), tokens, 4))
    for pieces in prompt_steps([len(ids) for ids in prompts], forward.sizes):
        fed = [(piece, prompts[piece.sequence][piece.start : piece.start + piece.tokens]) for piece in pieces]
        want = [0 if forced_PS is None else int(forced_PS[piece.sequence, 0]) for piece in pieces]
        for piece, row in zip(pieces, forward.last_rows(fed, want), strict=True):
            found[piece.sequence, 0] = row  # the last chunk's stays
    ids_PS = np.zeros((len(prompts), tokens), np.int64) if forced_PS is None else forced_PS.copy()
    for place in range(tokens):
        if forced_PS is None:
            ids_PS[:, place] = found[:, place, 0]
        if place + 1 < tokens:
            fed = [
                (Piece(i, len(prompt) + place, 1, decodes=True), ids_PS[i, place : place + 1])
                for i, prompt in enumerate(prompts)
            ]
            want = np.zeros(len(prompts), int) if forced_PS is None else ids_PS[:, place + 1]
            found[:, place + 1] = forward.last_rows(fed, want.tolist())
    # Of ids that are its own choice the reference knows the logprob of the largest only: that is theirs.
    logprob_PS = found[:, :, 3] if forced_PS is None else found[:, :, 2]
    return Positions(ids_PS, found[:, :, 0].astype(np.int64), found[:, :, 1], logprob_PS)


def prompt_steps(lengths: Sequence[int], sizes: Sizes) -> list[list[Piece]]:
    """The chunks of each step, several prompts together."""
    done, steps = [0] * len(lengths), []
    while list(lengths) != done:
        pieces, room = [], sizes.width
        for i, length in enumerate(lengths):
            if tokens := min(sizes.chunk_tokens, room, length - done[i]):
                pieces.append(Piece(i, done[i], tokens, decodes=False))
                done[i] += tokens
                room -= tokens
        steps.append(pieces)
    return steps


def compare(fast: Positions, reference: Positions) -> dict[str, Any]:
    """Both counts, the largest difference, and `faults`: sentences. A NaN passes nothing."""
    clear_PS = reference.margin_PS > MARGIN
    differs_PS = fast.argmax_PS != reference.forced_PS
    away_PS = np.abs(fast.logprob_PS - reference.logprob_PS)
    wrong, most = int((differs_PS & clear_PS).sum()), float(away_PS.max())
    faults = [] if wrong == 0 else [f"{wrong} of {clear_PS.sum()} clear places have another argmax, allowed: none"]
    if not clear_PS.any():
        faults.append(f"no place has two logits {MARGIN} apart, so that no argmax was judged")
    if not most <= LIMIT:
        faults.append(f"logprobs differ by up to {most:.3f}, allowed: {LIMIT}")
    return {
        "positions": int(clear_PS.size),
        "clear_positions": int(clear_PS.sum()),
        "other_argmax": int(differs_PS.sum()),
        "other_argmax_where_clear": wrong,
        "largest_logprob_difference": round(most, 5),
        "mean_logprob_difference": round(float(away_PS.mean()), 6),
        "faults": faults,
    }


def check(config: dict[str, Any], *, prompts: int, tokens: int, longest: int, seed: int) -> dict[str, Any]:
    """`compare` of one model on the first device, and what the run was. longest: tokens of a prompt."""
    spec, mesh = model_spec(config), make_mesh(jax.devices()[:1])
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, prompts)
    texts = [random.integers(0, spec.vocab_size, length) for length in lengths]
    sizes = Sizes(rows=prompts)
    splits = {dtype: split_decoder(spec, jnp.dtype(dtype), mesh) for dtype in ("bfloat16", "float32")}
    leaves = random_weights(splits["bfloat16"], seed)
    wide = [leaf.astype(want.dtype) for leaf, want in zip(leaves, splits["float32"].leaves, strict=True)]
    columns = np.zeros(1, np.int32)  # not used: each row has an id of its own
    start_s = time.monotonic()
    reference = run(Scored(splits["float32"], wide, longest + tokens, columns, sizes), texts, tokens, None)
    del wide
    forward = Scored(splits["bfloat16"], leaves, longest + tokens, columns, sizes)
    report = compare(run(forward, texts, tokens, reference.forced_PS), reference)
    return report | {"native_kernels": forward.native_kernels(), "seconds": round(time.monotonic() - start_s, 1)}
