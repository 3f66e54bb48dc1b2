"""The kernels of moe_route, bodies and launches: a warp a token, then the places of rows by counting bits.

Each CTA routes some tokens and keeps, for every expert, words with a bit for each of its tokens that chose it. From the
counts of all CTAs each knows how many rows come before its own: up to 256 tokens the CTAs are one cluster and read each
other's words; for more there are two launches, and counts go through memory. NOTES.md has figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moe_route import simt
from pallas_kernels.moe_route.contract import SIZES, RouteRule

WORD = 32  # tokens of a word, a bit each
MOST_CTAS = 8  # of a cluster
_MOST_THREADS = 1024
_NOBODY = 0xFFFF  # past any expert


@dataclass(frozen=True, slots=True)
class Sizes:
    """Static sizes of a launch: T tokens, `experts` of all devices, X of this one, S shared ones; words of each expert
    in a CTA."""

    tokens: int
    experts: int
    count: int
    rule: RouteRule
    bias: bool
    shared: int
    ctas: int
    words: int = 1

    @property
    def tokens_each(self) -> int:
        """Of a CTA; WORD * words at most."""
        return -(-self.tokens // self.ctas) if self.words == 1 else WORD * self.words

    @property
    def shared_rows(self) -> int:
        """S T: they come before all others."""
        return self.shared * self.tokens

    @property
    def assignments(self) -> int:
        """A."""
        return self.shared_rows + self.tokens * self.rule.top_k

    @property
    def no_experts(self) -> int:
        """Zeros behind the sizes of experts."""
        return -(self.shared + self.count) % SIZES

    @property
    def threads(self) -> int:
        """Of a CTA: a warp a token of a word, a thread an expert, whole warpgroups."""
        return -(-max(32 * min(self.tokens_each, WORD), self.count) // 128) * 128


_Array = jax.ShapeDtypeStruct


def route_sorted(
    logits_TX: jax.Array, live_T: jax.Array, first: jax.Array, bias_X: jax.Array | None, *, sizes: Sizes
) -> Sequence[jax.Array]:
    """row_A, weight_A, place_TJ and size_X of the contract's Routed, by one launch. live_T, first [1]: int32."""
    inputs = {"logits": logits_TX, "live": live_T, "first": first} | ({} if bias_X is None else {"bias": bias_X})
    scratch = {"words": sizes.count, "starts": sizes.count, "sums": WORD}
    return _launch("moe_route", route_body, inputs, _results(sizes), scratch, sizes, clustered=True)


def route_then_sort(
    logits_TX: jax.Array, live_T: jax.Array, first: jax.Array, bias_X: jax.Array | None, *, sizes: Sizes
) -> Sequence[jax.Array]:
    """The same by two launches, for any number of tokens."""
    T, J, X = sizes.tokens, sizes.rule.top_k, sizes.count
    inputs = {"logits": logits_TX, "live": live_T, "first": first} | ({} if bias_X is None else {"bias": bias_X})
    between = {
        "experts": _Array((T, J), jnp.int32),
        "weights": _Array((T, J), jnp.float32),
        "words": _Array((sizes.ctas * sizes.words, X), jnp.int32),
        "counts": _Array((sizes.ctas, X), jnp.int32),
    }
    scratch = {"own": sizes.words * X}
    made = _launch("moe_route_choose", choose_body, inputs, between, scratch, sizes)
    inputs = dict(zip(between, made, strict=True))
    scratch = {"starts": X, "sums": WORD, "size": _MOST_THREADS, "before": _MOST_THREADS}
    return _launch("moe_route_place", place_body, inputs, _results(sizes), scratch, sizes)


def _results(sizes: Sizes) -> dict[str, _Array]:
    return {
        "row": _Array((sizes.assignments,), jnp.int32),
        "weight": _Array((sizes.assignments,), jnp.float32),
        "place": _Array((sizes.tokens, sizes.shared + sizes.rule.top_k), jnp.int32),
        "size_X": _Array((sizes.shared + sizes.count + sizes.no_experts,), jnp.int32),
    }


def _launch(
    name: str,
    body: Callable[[Any, Any, Sizes], None],
    inputs: dict[str, jax.Array],
    outputs: dict[str, _Array],
    scratch: dict[str, int],
    sizes: Sizes,
    *,
    clustered: bool = False,
) -> Sequence[jax.Array]:
    """Runs a body with refs by name. scratch: sizes of int32 in shared memory."""
    names = (*inputs, *outputs, *scratch)

    def kernel(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(names))
        def emit(_: Any, *found: Any) -> None:
            body(
                simt.Machine(clustered and sizes.ctas > 1),
                SimpleNamespace(**dict(zip(names, found, strict=True))),
                sizes,
            )

        emit(*refs)

    kernel.__name__ = name  # a kernel is called after its body in profiles
    threads = sizes.threads if clustered else _MOST_THREADS
    grid = {"grid": (1,), "grid_names": ("all",), "cluster": (sizes.ctas,), "cluster_names": ("cta",)}
    call = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=[plgpu.SMEM((size,), jnp.int32) for size in scratch.values()],
        **(grid if clustered else {"grid": (sizes.ctas,), "grid_names": ("cta",)}),
        num_threads=threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(*inputs.values())


def route_body(m: Any, r: Any, sizes: Sizes) -> None:
    """One launch: choices, then places. m: simt.Machine or emulator.Emulator; r: refs by name."""
    X = sizes.count
    is_expert = m.thread < X
    expert_here = m.where(is_expert, m.thread, 0)
    m.store(r.words, m.thread, 0, where=is_expert)
    bit = m.warp  # of the token that this warp routes
    token, active = _token(m, bit, sizes)
    local, mine, weight = _choice(m, r, token, active, sizes)
    m.sync()  # words are zero
    m.store_or(r.words, local, 1 << bit, where=mine)
    m.sync_all()
    size = before = m.thread & 0
    for cta in range(sizes.ctas):
        rows = m.count_bits(m.load_of(r.words, expert_here, cta))
        size = size + rows
        before = before + m.where(m.cta > cta, rows, 0)
    size = m.where(is_expert, size, 0)
    start, rows = _starts(m, r, size, sizes.threads)
    m.store(r.starts, m.thread, start + before, where=is_expert)
    _store_sizes(m, r, size, is_expert, sizes)
    m.sync()
    [word], [start] = m.load(r.words, local), m.load(r.starts, local)
    place = start + m.count_bits(word & ((1 << bit) - 1))
    _store(m, r, token, active, mine, place, weight, sizes)
    _fill(m, r, rows, sizes.threads, sizes)
    if sizes.ctas > 1:
        m.sync_all()  # no CTA ends while another reads its words


def choose_body(m: Any, r: Any, sizes: Sizes) -> None:
    """First of two launches: choices, words and counts."""
    J, X = sizes.rule.top_k, sizes.count
    for index in range(0, sizes.words * X, _MOST_THREADS):
        m.store(r.own, m.thread + index, 0, where=m.thread + index < sizes.words * X)
    m.sync()
    for word in range(sizes.words):
        token, active = _token(m, m.warp + WORD * word, sizes)
        local, mine, weight = _choice(m, r, token, active, sizes)
        m.store_or(r.own, local + word * X, 1 << m.warp, where=mine)
        listed = active & (m.lane < J)
        m.store(r.experts, token * J + m.lane, m.where(mine, local, _NOBODY), where=listed)
        m.store(r.weights, token * J + m.lane, weight, where=listed)
    m.sync()
    is_expert = m.thread < X
    rows = m.thread & 0
    for word in range(sizes.words):
        [bits] = m.load(r.own, m.where(is_expert, m.thread + word * X, 0))
        m.store(r.words, (m.cta * sizes.words + word) * X + m.thread, bits, where=is_expert)
        rows = rows + m.count_bits(bits)
    m.store(r.counts, m.cta * X + m.thread, rows, where=is_expert)


def place_body(m: Any, r: Any, sizes: Sizes) -> None:
    """Second of two launches: sums of all counts, then places."""
    J, X = sizes.rule.top_k, sizes.count
    # Threads share the CTAs' counts among them: `parts` of them an expert.
    parts = max(1, min(sizes.ctas, _MOST_THREADS // X))
    part = m.thread & 0
    for index in range(1, parts):
        part = m.where(m.thread < index * X, part, index)
    expert = m.thread - part * X
    counting = m.thread < parts * X
    size = before = m.thread & 0
    for start in range(0, sizes.ctas, parts):
        cta = part + start
        counted = counting & (cta < sizes.ctas)
        [rows] = m.load(r.counts, m.where(counted, cta * X + expert, 0))
        rows = m.where(counted, rows, 0)
        size = size + rows
        before = before + m.where(cta < m.cta, rows, 0)
    m.store(r.size, m.thread, size, where=counting)
    m.store(r.before, m.thread, before, where=counting)
    m.sync()
    is_expert = m.thread < X
    size = before = m.thread & 0
    for index in range(parts):
        at = m.where(is_expert, m.thread + index * X, 0)
        size, before = size + m.load(r.size, at)[0], before + m.load(r.before, at)[0]
    size = m.where(is_expert, size, 0)
    start, rows = _starts(m, r, size, _MOST_THREADS)
    m.store(r.starts, m.thread, start + before, where=is_expert)
    _store_sizes(m, r, size, is_expert, sizes)
    m.sync()
    for word in range(sizes.words):
        token, active = _token(m, m.warp + WORD * word, sizes)
        listed = active & (m.lane < J)
        at = m.where(listed, token * J + m.lane, 0)
        [local], [weight] = m.load(r.experts, at), m.load(r.weights, at)
        mine = listed & (local < X)
        local = m.where(mine, local, 0)
        [place] = m.load(r.starts, local)
        for index in range(word + 1):
            [bits] = m.load(r.words, (m.cta * sizes.words + index) * X + local)
            place = place + m.count_bits(bits if index < word else bits & ((1 << m.warp) - 1))
        _store(m, r, token, active, mine, place, weight, sizes)
    _fill(m, r, rows, _MOST_THREADS, sizes)


def _token(m: Any, index: Any, sizes: Sizes) -> tuple[Any, Any]:
    """The CTA's token of this index, 0 where it has none, and whether it has."""
    token = m.cta * sizes.tokens_each + index
    active = (index < sizes.tokens_each) & (token < sizes.tokens)
    return m.where(active, token, 0), active


def _choice(m: Any, r: Any, token: Any, active: Any, sizes: Sizes) -> tuple[Any, Any, Any]:
    """Lane j's expert, counted from this device's first, whether it is one of this device's, and its weight."""
    [live], [first] = m.load(r.live, token), m.load(r.first, token & 0)
    expert, weight = choose(m, r, token, sizes)
    local = expert - first  # an expert before the first is far above X, as integers are unsigned
    mine = active & (m.lane < sizes.rule.top_k) & (live > 0) & (local < sizes.count)
    return m.where(mine, local, 0), mine, weight


def _starts(m: Any, r: Any, rows: Any, threads: int) -> tuple[Any, Any]:
    """Rows of all lower experts than a thread's, and of all experts. rows: of the thread's expert. Shared experts' rows
    are not counted: `_store` and `_fill` add them."""
    up_to = simt.running_total(m, rows)
    m.store(r.sums, m.warp, up_to, where=m.lane == 31)
    m.sync()
    is_warp = m.lane < threads // 32
    [sums] = m.load(r.sums, m.where(is_warp, m.lane, 0))
    sums = m.where(is_warp, sums, 0)
    return m.total(m.where(m.lane < m.warp, sums, 0)) + up_to - rows, m.total(sums)


def _store_sizes(m: Any, r: Any, rows: Any, is_expert: Any, sizes: Sizes) -> None:
    """rows: of the thread's expert."""
    first, S, none = m.cta == 0, sizes.shared, m.thread & 0
    m.store(r.size_X, m.thread + S, rows, where=is_expert & first)
    if S + sizes.no_experts:
        is_shared, writes = m.thread < S, m.thread < S + sizes.no_experts
        at = m.thread + m.where(is_shared, none, sizes.count)
        m.store(r.size_X, at, m.where(is_shared, none + sizes.tokens, 0), where=writes & first)


def _store(m: Any, r: Any, token: Any, active: Any, mine: Any, place: Any, weight: Any, sizes: Sizes) -> None:
    """Lane j's assignment of the warp's token, and lane s's shared one, whose place needs no counting."""
    S, J, A = sizes.shared, sizes.rule.top_k, sizes.assignments
    place = place + sizes.shared_rows
    m.store(r.place, token * (S + J) + S + m.lane, m.where(mine, place, A), where=active & (m.lane < J))
    m.store(r.row, place, token, where=mine)
    m.store(r.weight, place, weight, where=mine)
    if S:
        own, place = active & (m.lane < S), m.lane * sizes.tokens + token
        m.store(r.place, token * (S + J) + m.lane, place, where=own)
        m.store(r.row, place, token, where=own)
        m.store(r.weight, place, 1.0, where=own)


def _fill(m: Any, r: Any, rows: Any, threads: int, sizes: Sizes) -> None:
    """Rows of nobody: token 0, weight 0."""
    A = sizes.assignments
    for offset in range(sizes.shared_rows, A, sizes.ctas * threads):
        past = rows + m.cta * threads + m.thread + offset
        m.store(r.row, past, 0, where=past < A)
        m.store(r.weight, past, 0.0, where=past < A)


def choose(m: Any, r: Any, token: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Lane j's expert, the j-th best of the warp's token, and its weight. Lanes from top_k on have expert 0."""
    rule, each = sizes.rule, sizes.experts // 32
    lowest = m.lane * each  # of the experts that this lane looks at
    logits = m.load(r.logits, token * sizes.experts + lowest, each)
    by_logit = rule.by_logit(sizes.bias)
    scores = logits if by_logit else [_sigmoid(m, x) for x in logits]
    if sizes.bias:
        scores = [score + bias for score, bias in zip(scores, m.load(r.bias, lowest, each), strict=True)]
    keys = [simt.ordered(m, score) for score in scores]
    top = m.largest(simt.largest_of(m, keys)) if rule.scoring == "softmax" else None
    if rule.grouped:
        kept = kept_groups(m, keys, rule)
        keys = [m.where(kept, key, simt.LEAST) for key in keys]
    expert = m.lane & 0
    for place in range(rule.top_k):
        best = m.largest(simt.largest_of(m, keys))
        found = m.lane & 0 | _NOBODY
        for i, key in reversed(list(enumerate(keys))):
            found = m.where(key == best, lowest + i, found)  # the first of them stays
        found = m.smallest(found)
        expert = m.where(m.lane == place, found, expert)
        keys = [m.where(lowest + i == found, 0, key) for i, key in enumerate(keys)]
    [logit] = m.load(r.logits, token * sizes.experts + expert)
    if rule.scoring == "softmax":
        most = simt.unordered(m, top)
        parts = m.exp(logits[0] - most)
        for logit_i in logits[1:]:
            parts = parts + m.exp(logit_i - most)
        weight = m.exp(logit - most) / simt.float_total(m, parts)
    else:
        weight = _sigmoid(m, logit)
    if rule.renormalise:
        weight = weight / (simt.float_total(m, m.where(m.lane < rule.top_k, weight, 0.0)) + 1e-20)
    return expert, weight * rule.scale


def _sigmoid(m: Any, x: Any) -> Any:
    """With the same steps as XLA's on a GPU, so that the same choices tie."""
    return m.inverse(m.exp(0.0 - x) + 1.0)


def kept_groups(m: Any, keys: list[Any], rule: RouteRule) -> Any:
    """Whether the group of this lane's experts is among the best. A group is the experts of some neighbouring lanes."""
    lanes = 32 // rule.num_groups
    best = simt.largest_of(m, keys)
    if rule.group_score == "max":
        for distance in (d for d in (1, 2, 4, 8, 16) if d < lanes):
            best = m.max(best, m.of_lane(best, m.lane ^ distance))
        score = best
    else:
        second = m.lane & 0
        best = keys[0]
        for key in keys[1:]:
            best, second = m.max(best, key), m.max(second, m.min(best, key))
        for distance in (d for d in (1, 2, 4, 8, 16) if d < lanes):
            other, other_second = m.of_lane(best, m.lane ^ distance), m.of_lane(second, m.lane ^ distance)
            best, second = m.max(best, other), m.max(m.min(best, other), m.max(second, other_second))
        score = simt.ordered(m, simt.unordered(m, best) + simt.unordered(m, second))
    group = m.lane & 0
    for index in range(1, rule.num_groups):
        group = m.where(m.lane < index * lanes, group, index)
    better = m.lane & 0
    for index in range(rule.num_groups):
        other = m.of_lane(score, index * lanes)
        wins = (other > score) | ((other == score) & (group > index))
        better = better + m.where(wins, m.lane & 0 | 1, 0)
    return better < rule.kept_groups
