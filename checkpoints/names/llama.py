"""`model_type: llama`: decoder parameters <- Hugging Face tensors. Sizes: V vocabulary, D hidden, F width, N kv heads,
G query heads a kv head, E head."""

from __future__ import annotations

from checkpoints.names.table import NameTable, Part, Target, joined, plain
from jaxserve.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def name_table(spec: ModelSpec) -> NameTable:
    """A tied model has no head of its own: a head in the files must then equal the embedding."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    targets = {"embed.weight": plain(EMBEDDING, (vocab, hidden))}
    for i in range(spec.num_layers):
        layer = layer_targets(spec, f"model.layers.{i}")
        targets |= {f"layers.{i}.{name}": target for name, target in layer.items()}
    targets["norm.scale"] = plain("model.norm.weight", (hidden,))
    if spec.tie_embeddings:
        return NameTable(targets, IGNORED, {HEAD: EMBEDDING})
    return NameTable(targets | {"head.weight": plain(HEAD, (vocab, hidden))}, IGNORED)


def layer_targets(spec: ModelSpec, source: str) -> dict[str, Target]:
    """One layer's parameters."""
    hidden, width, attention = spec.hidden_size, spec.mlp_width, spec.attention
    kv_heads, group, dim = attention.num_kv_heads, attention.group, attention.head_dim
    heads = kv_heads * group
    block, mlp = f"{source}.self_attn", f"{source}.mlp"

    def projection(name: str, per_group: int, kind: str, *columns: int) -> Part:
        return Part(
            f"{block}.{name}_proj.{kind}", (kv_heads * per_group * dim, *columns), (kv_heads, per_group, dim, *columns)
        )

    def qkv(kind: str, *columns: int) -> Target:
        sizes = (("q", group), ("k", 1), ("v", 1))
        return joined(1, *(projection(name, size, kind, *columns) for name, size in sizes))

    def gated(name: str) -> Part:
        return Part(f"{mlp}.{name}_proj.weight", (width, hidden), (1, width, hidden))

    targets = {
        "attention_norm.scale": plain(f"{source}.input_layernorm.weight", (hidden,)),
        "attention.qkv": qkv("weight", hidden),
        "attention.out": plain(f"{block}.o_proj.weight", (hidden, heads * dim), (hidden, kv_heads, group, dim)),
        "mlp_norm.scale": plain(f"{source}.post_attention_layernorm.weight", (hidden,)),
        "mlp.gate_up": joined(0, gated("gate"), gated("up")),
        "mlp.down": plain(f"{mlp}.down_proj.weight", (hidden, width)),
    }
    if attention.qkv_bias:
        targets["attention.qkv_bias"] = qkv("bias")
    if attention.out_bias:
        targets["attention.out_bias"] = plain(f"{block}.o_proj.bias", (hidden,))
    return targets
