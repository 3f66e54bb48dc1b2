"""Grouped-query attention's parameters <- a layer's source tensors: separate q, k, v as everywhere, or one fused."""

from __future__ import annotations

from checkpoints.names.table import Cut, Part, Target, joined, plain
from jaxserve.layers.gqa import GqaSpec


def separate(spec: GqaSpec, hidden: int, source: str) -> dict[str, Target]:
    """From `source`.{q,k,v,o}_proj."""

    def projections(kind: str, *columns: int) -> Target:
        parts = [
            Part(f"{source}.{name}_proj.{kind}", (rows(shape), *columns), (*shape, *columns))
            for name, shape in head_shapes(spec).items()
        ]
        return joined(1, *parts)

    targets = {"qkv": projections("weight", hidden), "out": out(spec, hidden, f"{source}.o_proj.weight")}
    if spec.qkv_bias:
        targets["qkv_bias"] = projections("bias")
    if spec.out_bias:
        targets["out_bias"] = plain(f"{source}.o_proj.bias", (hidden,))
    if spec.qk_norm_eps is not None:
        targets |= {
            f"{name}.scale": plain(f"{source}.{name}.weight", (spec.head_dim,)) for name in ("q_norm", "k_norm")
        }
    return targets


def fused(spec: GqaSpec, hidden: int, source: str) -> dict[str, Target]:
    """From `source`.query_key_value, whose rows are all queries, all keys, all values; and `source`.dense."""

    def projections(kind: str, *columns: int) -> Target:
        shapes, parts, at = head_shapes(spec).values(), [], 0
        whole = (sum(map(rows, shapes)), *columns)
        for shape in shapes:
            cut = Cut(whole, 0, at, at + rows(shape))
            parts.append(Part(f"{source}.query_key_value.{kind}", whole, (*shape, *columns), cut))
            at = cut.stop
        return joined(1, *parts)

    targets = {"qkv": projections("weight", hidden), "out": out(spec, hidden, f"{source}.dense.weight")}
    return targets | ({"qkv_bias": projections("bias")} if spec.qkv_bias else {})


def head_shapes(spec: GqaSpec) -> dict[str, tuple[int, int, int]]:
    """Rows of q, k and v as [kv heads, of each, head]."""
    heads, dim = spec.num_kv_heads, spec.head_dim
    return {"q": (heads, spec.group, dim), "k": (heads, 1, dim), "v": (heads, 1, dim)}


def rows(shape: tuple[int, int, int]) -> int:
    """How many they are."""
    return shape[0] * shape[1] * shape[2]


def out(spec: GqaSpec, hidden: int, source: str) -> Target:
    """The output projection: its columns by kv head and group."""
    return plain(
        source, (hidden, spec.num_heads * spec.head_dim), (hidden, spec.num_kv_heads, spec.group, spec.head_dim)
    )
