"""The physical limit of each serving workload: a model's facts in, the figure that no engine on this GPU can beat out.

A pass over the model takes max(bytes / 4.58 TB/s, operations / 790 TFLOP/s), the best rates seen on an H200. Bytes are
the bfloat16 weights that the pass touches, once, and the cache that it reads; of experts, those that a uniform router
touches: E (1 - (1 - k/E)^tokens) of E. Operations are two a weight and token, and those of causal attention (of MLA in
its expanded form). Prompts run before decoding, which takes one step for each output token after the first, of as many
sequences as the workload has, 256 allow and the cache holds in 0.85 of the GPU's memory, as the engines compared with
have it. Norms, the embedding's rows, activations and biases are left out; at these sizes they are under 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.layers.mla import MlaSpec
from jaxserve.models.spec import ModelSpec
from scripts._bench_workloads import STEADY_STEPS, WORKLOADS, Ask, Limits

BYTES_PER_S = 4.58e12
OPERATIONS_PER_S = 790e12
GPU_BYTES = 143771 << 20  # of an H200, as its driver counts them
GPU_SHARE = 0.85  # that weights and cache may take
MAX_NUM_SEQS = 256
ELEMENT_BYTES = 2
WORKLOAD_OF = {key: name for name, workload in WORKLOADS.items() for key in workload.keys}


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights, head included, embedding not, and the sizes that attention works on."""

    always: int  # of all layers, those that every token passes, shared experts too, whichever product has them
    head: int
    expert: int  # of one routed expert of one layer
    moe_layers: int
    num_experts: int
    top_k: int
    cached_per_token: int  # elements, all layers
    attention_per_pair: int  # multiplications of a query token with a cached one, all layers and heads

    @classmethod
    def of(cls, spec: ModelSpec) -> Weights:
        """The sums over a model's layers; multi-token prediction layers, which do not run, are left out."""
        hidden, moe = spec.hidden_size, spec.moe
        moe_layers = sum(spec.is_moe(layer) for layer in range(spec.num_layers))
        layer, cached, pair = attention_sizes(spec)
        dense = (spec.num_layers - moe_layers) * 3 * hidden * spec.mlp_width
        beside = moe_layers * hidden * (moe.num_experts + 3 * moe.shared_width) if moe else 0
        return cls(
            always=spec.num_layers * layer + dense + beside,
            head=hidden * spec.vocab_size,
            expert=3 * hidden * moe.width if moe else 0,
            moe_layers=moe_layers,
            num_experts=moe.num_experts if moe else 0,
            top_k=moe.rule.top_k if moe else 0,
            cached_per_token=spec.num_layers * cached,
            attention_per_pair=spec.num_layers * pair,
        )

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a pass over so many tokens touches."""
        touched = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens) if self.num_experts else 0
        return ELEMENT_BYTES * (self.always + self.head + self.moe_layers * self.expert * touched)

    @property
    def cached_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        return ELEMENT_BYTES * self.cached_per_token

    @property
    def used(self) -> int:
        """Weights that one token passes, the head not counted: a prompt needs it for its last token alone."""
        return self.always + self.moe_layers * self.top_k * self.expert


def attention_sizes(spec: ModelSpec) -> tuple[int, int, int]:
    """Of one layer: weights of the projections; elements cached a token; multiplications a pair of tokens."""
    hidden, how = spec.hidden_size, spec.attention
    if isinstance(how, MlaSpec):
        queries = how.num_heads * how.head_dim
        query = hidden * queries if how.q_rank is None else how.q_rank * (hidden + queries)
        expand = how.rank * how.num_heads * (how.nope_dim + how.value_dim)
        weights = query + hidden * how.cached_dim + expand + how.num_heads * how.value_dim * hidden
        return weights, how.cached_dim, how.num_heads * (how.head_dim + how.value_dim)
    query, keys = how.num_heads * how.head_dim, 2 * how.num_kv_heads * how.head_dim
    return hidden * (2 * query + keys), keys, 2 * query


def decode_s(weights: Weights, rows: float, context_tokens: float) -> float:
    """Seconds of one decode step of so many sequences, each with so many tokens in the cache."""
    operations = 2 * rows * (weights.used + weights.head + context_tokens * weights.attention_per_pair)
    cache_bytes = rows * context_tokens * weights.cached_bytes
    return pass_s(weights.read_bytes(round(rows)) + cache_bytes, operations)


def prefill_s(weights: Weights, asks: Sequence[Ask]) -> float:
    """Seconds for all the prompts; their cache is read on the chip."""
    tokens = sum(ask.prompt_tokens for ask in asks)
    pairs = sum(ask.prompt_tokens**2 / 2 for ask in asks)
    operations = 2 * (tokens * weights.used + pairs * weights.attention_per_pair + len(asks) * weights.head)
    return pass_s(weights.read_bytes(tokens), operations)


def pass_s(read_bytes: float, operations: float) -> float:
    """Seconds of a pass over the model at the best rates seen."""
    return max(read_bytes / BYTES_PER_S, operations / OPERATIONS_PER_S)


def serve_s(weights: Weights, asks: Sequence[Ask]) -> float:
    """Seconds for all requests: every prompt, then as few decode steps as the sequences that fit allow."""
    tokens = sum(ask.prompt_tokens + ask.max_tokens for ask in asks) / len(asks)
    pool_bytes = GPU_BYTES * GPU_SHARE - ELEMENT_BYTES * stored(weights)
    rows = min(len(asks), MAX_NUM_SEQS, int(pool_bytes / (tokens * weights.cached_bytes)))
    steps = sum(ask.max_tokens - 1 for ask in asks) / rows
    context_tokens = sum(ask.prompt_tokens + ask.max_tokens / 2 for ask in asks) / len(asks)
    return prefill_s(weights, asks) + steps * decode_s(weights, rows, context_tokens)


def stored(weights: Weights) -> int:
    """All weights on the device, the embedding's too."""
    return weights.always + 2 * weights.head + weights.moe_layers * weights.num_experts * weights.expert


def limit(spec: ModelSpec, key: str) -> float:
    """The limit of a figure of the results file, in its own unit. Raises KeyError for an unknown key."""
    weights = Weights.of(spec)
    asks = WORKLOADS[WORKLOAD_OF[key]].asks(Limits(spec.max_len, MAX_NUM_SEQS, 0, 8192, max_chunks=16))
    prompt, output = asks[0].prompt_tokens, asks[0].max_tokens
    if key.endswith("_step_ms"):
        return 1e3 * decode_s(weights, len(asks), prompt + STEADY_STEPS / 2)
    if key.endswith("_tpot_ms"):
        return 1e3 * decode_s(weights, len(asks), prompt + output / 2)
    if key.endswith("_ttft_ms"):
        return 1e3 * prefill_s(weights, asks)
    if key.startswith("prefill_"):
        return sum(ask.prompt_tokens for ask in asks) / prefill_s(weights, asks)
    served = len(asks) if key.endswith("_req_s") else sum(ask.max_tokens for ask in asks)
    return served / serve_s(weights, asks)
