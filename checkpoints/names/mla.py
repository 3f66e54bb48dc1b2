"""Multi-head latent attention's parameters <- a layer's source tensors."""

from __future__ import annotations

from checkpoints.names.table import Cut, Part, Target, joined, plain
from jaxserve.layers.mla import MlaSpec


def latent(spec: MlaSpec, hidden: int, source: str) -> dict[str, Target]:
    """From `source`.{q_proj or q_a_proj and q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj} and two norms.

    The rows of a head are without position first, then rotary (q), or without position first, then values (kv_b).
    Nothing is permuted: rotary rows stay in the pairs that they are stored in.
    """

    def matrix(name: str, rows: int, columns: int) -> Part:
        return Part(f"{source}.{name}.weight", (rows, columns), (rows, columns))

    down = [matrix("kv_a_proj_with_mqa", spec.cached_dim, hidden)]
    targets: dict[str, Target] = {}
    if spec.q_rank:
        down.insert(0, matrix("q_a_proj", spec.q_rank, hidden))
        targets["q_norm.scale"] = plain(f"{source}.q_a_layernorm.weight", (spec.q_rank,))
    heads, query_shape = spec.num_heads, (spec.num_heads, spec.head_dim, spec.q_rank or hidden)
    query = f"{source}.{'q_b_proj' if spec.q_rank else 'q_proj'}.weight"
    return targets | {
        "down": joined(0, *down),
        "q": plain(query, (heads * spec.head_dim, query_shape[-1]), query_shape),
        "latent_norm.scale": plain(f"{source}.kv_a_layernorm.weight", (spec.rank,)),
        "key_up": up(spec, source, 0, spec.nope_dim),
        "value_up": up(spec, source, spec.nope_dim, spec.nope_dim + spec.value_dim),
        "out": plain(f"{source}.o_proj.weight", (hidden, heads * spec.value_dim), (hidden, heads, spec.value_dim)),
    }


def up(spec: MlaSpec, source: str, start: int, stop: int) -> Target:
    """These rows of each head of kv_b_proj."""
    each = spec.nope_dim + spec.value_dim
    cut = Cut((spec.num_heads, each, spec.rank), 1, start, stop)
    whole = (spec.num_heads * each, spec.rank)
    return joined(0, Part(f"{source}.kv_b_proj.weight", whole, (spec.num_heads, stop - start, spec.rank), cut))
