"""Our fast path against our plain one: the same weights and ids, in bfloat16 with our kernels and in float32 without.

float32 chooses its ids greedily; bfloat16 is fed them. Both go through the paged cache in the same steps: chunks of
several prompts together, then all sequences in decode steps. Each layer's experts are compared too: where a token goes
to another one, its logprob moves by more than all rounding together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers import paged
from jaxserve.layers.paged import Cache
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.compile import compile_all
from jaxserve.runtime.weights import random_weights
from pallas_kernels.moe_route.contract import Routed, moe_route
from scripts._parity_ours import Forward, Piece, Rows, Sizes

MARGIN = 0.15  # between the reference's two largest logits: below it the order may change
LIMIT = 0.05  # of the difference between logprobs of the reference's id
REPORTED_STEPS = 16  # decode steps between two lines for a person who waits

# Of the reference. Trying out products is what a float32 model takes 50 s for (H200, four layers of V2-Lite): these
# programs run for seconds, so cuBLAS takes what it thinks best.
PLAIN_PRODUCTS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

Progress = Callable[[str], None]  # one line for a person who waits


@dataclass(frozen=True, slots=True)
class Positions:
    """Of P prompts x S generated ids. forced_PS: the ids that were fed; the others belong to the place before each."""

    forced_PS: np.ndarray
    argmax_PS: np.ndarray
    margin_PS: np.ndarray  # between the two largest logits
    logprob_PS: np.ndarray  # of the forced id
    experts_PSC: np.ndarray  # of each layer in turn, ascending within it; C is 0 where all layers are dense


class Scored(Forward):
    """Steps that keep of each row: the argmax, the margin to the second, the logprobs of one id and of the largest,
    and the experts. `options` are the compiler's."""

    def __init__(self, *args: Any, options: dict[str, Any] | None = None) -> None:
        self.options = options or {}
        super().__init__(*args)

    def wanted(self, is_decode: bool) -> jax.Array:
        """Ids of a step's rows, of which nothing is known yet."""
        return jnp.zeros(self.sizes.rows if is_decode else self.sizes.width, jnp.int32)

    def lowered(self, name: str) -> jax.stages.Lowered:
        """As Forward's, with an id for each row in place of columns."""
        is_decode = name == "decode"
        jitted = jax.jit(self.forward, donate_argnums=1, compiler_options=self.options)
        return jitted.lower(self.leaves, self.caches, self.wanted(is_decode), self.pack([], is_decode))

    def forward(
        self, leaves: list[jax.Array], caches: list[Cache], columns: jax.Array, rows: Rows
    ) -> tuple[tuple[jax.Array, ...], list[Cache]]:
        """As Forward's, and after it each row's experts, [T, C]."""
        chosen: list[jax.Array] = []

        def route(*args: Any, **options: Any) -> Routed:
            routed = moe_route(*args, **options)
            chosen.append(experts(routed)[:, options["shared"] :])  # shared ones come first
            return routed

        with mock.patch.object(paged, "moe_route", route):
            kept, caches = super().forward(leaves, caches, columns, rows)
        none_T0 = jnp.zeros((rows.token_T.shape[0], 0), jnp.int32)
        return (*kept, jnp.concatenate([none_T0, *chosen], axis=1)), caches

    def kept(self, logits_TV: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
        """columns: an id for each row."""
        logits_TV = logits_TV.astype(jnp.float32)
        top_T2 = jax.lax.top_k(logits_TV, 2)[0]
        total_T = jax.nn.logsumexp(logits_TV, axis=1)
        chosen_T = jnp.take_along_axis(logits_TV, columns[:, None], axis=1)[:, 0]
        return jnp.argmax(logits_TV, 1), top_T2[:, 0] - top_T2[:, 1], chosen_T - total_T, top_T2[:, 0] - total_T

    def last_rows(self, pieces: Sequence[tuple[Piece, np.ndarray]], want: Sequence[int]) -> np.ndarray:
        """[pieces, 4 + C]: what is kept of each piece's last token; want: the id after it."""
        is_decode = all(piece.decodes for piece, _ in pieces)
        ends = np.cumsum([piece.tokens for piece, _ in pieces])
        columns = np.array(self.wanted(is_decode))
        columns[ends - 1] = want
        program = self.programs["decode" if is_decode else "mixed"]
        kept, self.caches = program(self.leaves, self.caches, jnp.asarray(columns), self.pack(pieces, is_decode))
        return np.column_stack([np.asarray(part, np.float64)[ends - 1] for part in kept])


def experts(routed: Routed) -> jax.Array:
    """int32 [T, S + J], ascending: each token's experts, from where its rows stand in the sorted order."""
    expert_TJ = (routed.place_TJ[..., None] >= jnp.cumsum(routed.size_X)).sum(axis=2, dtype=jnp.int32)
    return jnp.sort(expert_TJ, axis=1)


def run(
    forward: Scored,
    prompts: Sequence[np.ndarray],
    tokens: int,
    forced_PS: np.ndarray | None,
    progress: Progress = lambda line: None,
) -> Positions:
    """Feeds the prompts and then `tokens` ids each: the given ones, or where there are none each place's argmax."""
    spec = forward.split.spec
    choices = sum(spec.moe.rule.top_k for i in range(spec.num_layers) if spec.is_moe(i)) if spec.moe else 0
    found = np.zeros((len(prompts), tokens, 4 + choices))
    steps = prompt_steps([len(ids) for ids in prompts], forward.sizes)
    for index, pieces in enumerate(steps):
        fed = [(piece, prompts[piece.sequence][piece.start : piece.start + piece.tokens]) for piece in pieces]
        want = [0 if forced_PS is None else int(forced_PS[piece.sequence, 0]) for piece in pieces]
        for piece, row in zip(pieces, forward.last_rows(fed, want), strict=True):
            found[piece.sequence, 0] = row  # the last chunk's stays
        progress(f"prompts, step {index + 1} of {len(steps)}")
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
            if (place + 1) % REPORTED_STEPS == 0:
                progress(f"ids, {place + 1} of {tokens}")
    # Of ids that are its own choice the reference knows the logprob of the largest only: that is theirs.
    logprob_PS = found[:, :, 3] if forced_PS is None else found[:, :, 2]
    return Positions(ids_PS, found[:, :, 0].astype(np.int64), found[:, :, 1], logprob_PS, found[:, :, 4:])


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
    """Both counts, the differences, and `faults`: sentences. A NaN passes nothing.

    `same_experts` is the same of the places where every layer chose the reference's experts.
    """
    clear_PS = reference.margin_PS > MARGIN
    differs_PS = fast.argmax_PS != reference.forced_PS
    away_PS = np.abs(fast.logprob_PS - reference.logprob_PS)
    wrong, most = int((differs_PS & clear_PS).sum()), float(away_PS.max())
    faults = [] if wrong == 0 else [f"{wrong} of {clear_PS.sum()} clear places have another argmax, allowed: none"]
    if not clear_PS.any():
        faults.append(f"no place has two logits {MARGIN} apart, so that no argmax was judged")
    if not most <= LIMIT:
        faults.append(f"logprobs differ by up to {most:.3f}, allowed: {LIMIT}")
    same_PS = (fast.experts_PSC == reference.experts_PSC).all(axis=2)
    return {
        "positions": int(clear_PS.size),
        "clear_positions": int(clear_PS.sum()),
        "other_argmax": int(differs_PS.sum()),
        "other_argmax_where_clear": wrong,
        **spread(away_PS.ravel()),
        "same_experts": {
            "positions": int(same_PS.sum()),
            "other_argmax_where_clear": int((differs_PS & clear_PS & same_PS).sum()),
            **spread(away_PS[same_PS]),
        },
        "faults": faults,
    }


def spread(away: np.ndarray) -> dict[str, Any]:
    """Of the differences between logprobs; a NaN counts as above the limit."""
    most, mean, rms = (away.max(), away.mean(), np.sqrt(np.mean(away**2))) if away.size else (0.0, 0.0, 0.0)
    return {
        "logprobs_above_limit": int((~(away <= LIMIT)).sum()),
        "largest_logprob_difference": round(float(most), 5),
        "mean_logprob_difference": round(float(mean), 6),
        "rms_logprob_difference": round(float(rms), 6),
    }


def check(
    config: dict[str, Any],
    *,
    prompts: int,
    tokens: int,
    longest: int,
    seed: int,
    progress: Progress = lambda line: None,
) -> dict[str, Any]:
    """`compare` of one model on the first device, and what the run was. longest: tokens of a prompt."""
    start_s = time.monotonic()

    def told(line: str) -> None:
        progress(f"{time.monotonic() - start_s:6.1f} s  {line}")

    spec, mesh = model_spec(config), make_mesh(jax.devices()[:1])
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest + 1, prompts)
    texts = [random.integers(0, spec.vocab_size, length) for length in lengths]
    sizes = Sizes(rows=prompts)
    splits = {dtype: split_decoder(spec, jnp.dtype(dtype), mesh) for dtype in ("bfloat16", "float32")}
    leaves = random_weights(splits["bfloat16"], seed)
    wide = [leaf.astype(want.dtype) for leaf, want in zip(leaves, splits["float32"].leaves, strict=True)]
    jax.block_until_ready(wide)
    told("weights made")
    same = (longest + tokens, np.zeros(1, np.int32), sizes)  # no columns: each row has an id of its own
    plain = Scored(splits["float32"], wide, *same, options=PLAIN_PRODUCTS)
    fast = Scored(splits["bfloat16"], leaves, *same)
    compile_together({"float32": plain, "bfloat16": fast}, told)
    reference = run(plain, texts, tokens, None, lambda line: told(f"float32 {line}"))
    forced = run(fast, texts, tokens, reference.forced_PS, lambda line: told(f"bfloat16 {line}"))
    about = {"native_kernels": fast.native_kernels(), "seconds": round(time.monotonic() - start_s, 1)}
    return compare(forced, reference) | about


def compile_together(forwards: dict[str, Scored], progress: Progress) -> None:
    """All programs at once: XLA compiles the first while the next are lowered, which is Python."""
    lowerings = {
        (name, kind): lower for name, forward in forwards.items() for kind, lower in forward.lowerings().items()
    }
    programs = compile_all(lowerings, len(lowerings), lambda key, *_: progress(f"{' '.join(key)} compiled"))
    for (name, kind), program in programs.items():
        forwards[name].programs[kind] = program
