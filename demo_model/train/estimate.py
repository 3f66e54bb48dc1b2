"""What training a model costs, from its shapes alone: operations and memory, said before a run begins."""

from __future__ import annotations

import math

from demo_model.train.options import Options
from jaxserve.layers.mla import MlaSpec
from jaxserve.models.decoder import SplitDecoder


def parameters(split: SplitDecoder) -> dict[str, int]:
    """Numbers of parameters by part of the model."""
    found: dict[str, int] = {}
    for name, leaf in zip(split.names, split.leaves, strict=True):
        words = name.split(".")
        part = f"layers {words[2].split('_')[0]}" if words[0] == "layers" else words[0]
        found[part] = found.get(part, 0) + math.prod(leaf.shape)
    return found | {"all": sum(found.values())}


def token_flops(split: SplitDecoder, row_tokens: int) -> float:
    """Operations of a trained token, forward and backward: 6 a weight of every product (experts all count, as all are
    computed), the head once more for the MTP layer, and attention over whole rows."""
    spec, attention = split.spec, split.spec.attention
    assert isinstance(attention, MlaSpec)
    pairs = zip(split.names, split.leaves, strict=True)
    products = sum(math.prod(leaf.shape) for name, leaf in pairs if leaf.ndim > 1 and name != "embed.weight")
    heads = (1 + bool(spec.mtp_layers)) * spec.vocab_size * spec.hidden_size
    layers = spec.num_layers + spec.mtp_layers
    scores = layers * row_tokens * attention.num_heads * (attention.head_dim + attention.value_dim)
    return 6.0 * (products + heads + scores)


def part_bytes(split: SplitDecoder, options: Options) -> float:
    """Device memory that the backward pass of one part of a batch needs, about: attention's weights in float32 and in
    the model's dtype, experts' gate and up in both, and the logits twice for each head."""
    spec = split.spec
    attention, moe = spec.attention, spec.moe
    wide = 4 + (2 if options.dtype == "bfloat16" else 4)
    scores = attention.num_heads * options.row_tokens * wide
    experts = (moe.num_experts + moe.grouped_shared) * moe.width * 3 * wide if moe else 3 * spec.mlp_width * wide
    rest = 24 * spec.hidden_size * 4
    logits = (1 + bool(spec.mtp_layers)) * 2 * spec.vocab_size * 4
    tokens = options.part_rows * options.row_tokens
    return tokens * ((spec.num_layers + spec.mtp_layers) * (scores + experts + rest) + logits)


def describe(split: SplitDecoder, options: Options, rows: int) -> str:
    """For the screen."""
    counts = ", ".join(f"{part} {count / 1e6:.2f} M" for part, count in parameters(split).items())
    flops, tokens = token_flops(split, options.row_tokens), options.batch_rows * options.row_tokens
    return (
        f"parameters: {counts}\n"
        f"about {flops / 1e9:.3f} GFLOP a token, {flops * tokens / 1e12:.1f} TFLOP a step of {tokens:,} tokens; about "
        f"{part_bytes(split, options) / 1e9:.1f} GB for a part of {options.part_rows} rows\n"
        f"{rows * options.row_tokens / 1e6:.1f} M tokens an epoch, {rows // options.batch_rows} steps"
    )
