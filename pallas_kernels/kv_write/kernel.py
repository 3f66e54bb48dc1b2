"""The kernel of kv_write in Pallas Mosaic GPU: one CTA a token, everything in registers.

All rows of a token are read before the first is written, so that one latency covers them all. NOTES.md has figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rotary import Rotary, Rows, pieces, tile_rows, values_each


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    tokens: int = 1  # a CTA


@dataclass(frozen=True, slots=True)
class Write:
    """What is done to the rows on their way. The arrays beside it: bias where `bias`, two scales where `eps`."""

    rotary: Rotary
    bias: bool
    eps: float | None


def write(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    qkv_TNSE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    extras: tuple[jax.Array, ...],
    *,
    how: Write,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, N, G, E] and the pools, which are written in place. extras: bias_NSE, then q's and k's scale_E."""
    T, N, S, E = qkv_TNSE.shape

    def kv_write(*refs: Any) -> None:
        names = ["qkv", "cos", "sin", "page", "offset", *["bias"] * how.bias]
        names += ["q_scale", "k_scale"] * (how.eps is not None) + ["k", "v", "q"]
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), interpreted=interpret is not None)
        first = lax.axis_index("block") * tuning.tokens
        for index in range(tuning.tokens):
            # The last block may hang over: its last token is then done again, with the same result.
            _token(r, first if tuning.tokens == 1 else jnp.minimum(first + index, T - 1), how)

    k_ref, v_ref = jax.new_ref(k_PNKE), jax.new_ref(v_PNKE)
    call = plgpu.kernel(
        kv_write,
        out_type=jax.ShapeDtypeStruct((T, N, S - 2, E), qkv_TNSE.dtype),
        grid=(-(-T // tuning.tokens),),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    q_TNGE = call(qkv_TNSE, cos_TC, sin_TC, page_T, offset_T, *extras, k_ref, v_ref)
    return q_TNGE, jax.freeze(k_ref), jax.freeze(v_ref)


def values_held(kv_heads: int, group: int, rotary: Rotary, head_dim: int) -> int:
    """Values of a token that a thread holds at once."""
    parts = pieces(rotary, head_dim)
    over_heads = values_each(kv_heads, parts)
    if _by_slot(kv_heads, group):
        return over_heads * (group + 2)
    return kv_heads * values_each(group, parts) + 2 * over_heads


def _by_slot(kv_heads: int, group: int) -> bool:
    """Whether a tile's rows are the kv heads of one slot, not the queries of one kv head: what fills more threads."""
    return tile_rows(kv_heads) >= tile_rows(group)


def _token(r: SimpleNamespace, token: jax.Array, how: Write) -> None:
    """Reads all rows of a token, then norms, turns and writes them."""
    pages, N, _, E = r.k.shape
    G = r.q.shape[2]
    page, offset = r.page[token], r.offset[token]
    over_heads = Rows.of(N, how.rotary, E, interpreted=r.interpreted)
    by_slot = _by_slot(N, G)
    over_queries = over_heads if by_slot else Rows.of(G, how.rotary, E, interpreted=r.interpreted)
    if by_slot:
        places = [(slice(None), slot) for slot in range(G)]
    else:
        places = [(head, pl.ds(0, G)) for head in range(N)]

    def load(rows: Rows, place: Any) -> list[jax.Array]:
        values = rows.load(r.qkv.at[(token, *place)])
        if not how.bias:
            return values
        biases = rows.load(r.bias.at[place])
        # In fp32, where the sum of two bf16 values is rounded once to bf16, as a sum in bf16 is.
        return [
            (value.astype(jnp.float32) + bias.astype(jnp.float32)).astype(value.dtype)
            for value, bias in zip(values, biases, strict=True)
        ]

    def turn(rows: Rows, tiles: list[list[jax.Array]], scale: str) -> list[list[jax.Array]]:
        cos, sin = rows.angles(r.cos.at[token]), rows.angles(r.sin.at[token])
        if how.eps is not None:
            scales = rows.vectors(getattr(r, scale))
            tiles = [rows.normed(values, scales, how.eps) for values in tiles]
        return [rows.turned(values, cos, sin) for values in tiles]

    queries = [load(over_queries, place) for place in places]
    key, value = (load(over_heads, (slice(None), G + i)) for i in range(2))
    # No load may come after a store: the compiler must take them to meet, and would wait.
    queries = turn(over_queries, queries, "q_scale")
    [key] = turn(over_heads, [key], "k_scale")
    for place, query in zip(places, queries, strict=True):
        over_queries.store(r.q.at[(token, *place)], query)

    @pl.when((page >= 0) & (page < pages))
    def _() -> None:
        over_heads.store(r.k.at[page, :, offset], key)
        over_heads.store(r.v.at[page, :, offset], value)
