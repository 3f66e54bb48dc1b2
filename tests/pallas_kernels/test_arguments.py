"""Arguments that no op takes, whatever runs it: ranks, dtypes and empty axes, each refused with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.arguments import require
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import gqa_decode
from pallas_kernels.gqa_prefill.contract import gqa_prefill
from pallas_kernels.grouped_gemm.contract import down, gate_up
from pallas_kernels.kv_write.contract import QkNorm, kv_write
from pallas_kernels.latent_write.contract import latent_write
from pallas_kernels.mla_decode.contract import mla_decode
from pallas_kernels.mla_prefill.contract import mla_prefill
from pallas_kernels.moe_route.contract import RouteRule, combine, moe_route, sort_by_expert
from pallas_kernels.rotary import Rotary
from pallas_kernels.sampling.contract import sample


def real(*shape: int, dtype: str = "float32") -> jnp.ndarray:
    return jnp.ones(shape, dtype)


def whole(*shape: int) -> jnp.ndarray:
    return jnp.zeros(shape, jnp.int32)


DEVICE = {"device": Device("cpu")}
SCALED = {"scale": 1.0, **DEVICE}
BORDERS = {"table_RM": whole(2, 3), "start_R": whole(2), "tokens_R": whole(2), "position_R": whole(2)}
POOLS = {"k_PNKE": real(6, 2, 16, 64), "v_PNKE": real(6, 2, 16, 64)}
TABLE = {"table_BM": whole(2, 3), "length_B": whole(2)}
PLACES = {"cos_TC": real(5, 4), "sin_TC": real(5, 4), "page_T": whole(5), "offset_T": whole(5), "rotary": Rotary(8)}
# Calls that are good as they stand.
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    mla_decode: {"q_BHL": real(2, 4, 40), "latent_PKL": real(6, 16, 40), **TABLE, "rank": 32, **SCALED},
    gqa_decode: {"q": real(2, 2, 3, 64), **POOLS, **TABLE, **SCALED},
    gqa_prefill: {"q_TNGE": real(5, 2, 3, 64), **POOLS, **BORDERS, **SCALED},
    mla_prefill: {
        "q_THE": real(5, 4, 24),
        "latent_PKL": real(6, 16, 40),
        "key_up_HNR": real(4, 16, 32),
        "value_up_HVR": real(4, 16, 32),
        **BORDERS,
        **SCALED,
    },
    gate_up: {"x_TD": real(5, 32), "row_A": whole(10), "w_X2FD": real(3, 2, 16, 32), "size_X": whole(3), **DEVICE},
    down: {"h_AF": real(10, 16), "w_XDF": real(3, 32, 16), "size_X": whole(3), "weight_A": real(10), **DEVICE},
    moe_route: {
        "logits_TX": real(5, 8),
        "bias_X": None,
        "live_T": jnp.ones(5, bool),
        "rule": RouteRule("softmax", 2),
        "count": 4,
        **DEVICE,
    },
    sort_by_expert: {"expert_TJ": whole(5, 2), "first": 0, "count": 3},
    combine: {"y_AD": real(10, 4), "place_TJ": whole(5, 2), "dtype": jnp.bfloat16},
    kv_write: {**POOLS, "qkv_TNSE": real(5, 2, 4, 64), **PLACES, **DEVICE},
    latent_write: {
        "latent_PKL": real(6, 16, 40),
        "down_TW": real(5, 48),
        "scale_R": real(32),
        "q_THE": real(5, 4, 24),
        **PLACES,
        "eps": 1e-5,
        **DEVICE,
    },
    sample: {"x_BV": real(3, 9), "uniform_B": real(3), **DEVICE},
}
BF16 = "bfloat16"
REFUSED: tuple[tuple[Callable[..., Any], dict[str, Any], str], ...] = (
    (mla_decode, {"q_BHL": real(2, 0, 40)}, "q is float32 (2, 0, 40), must have no axis of size 0"),
    (mla_decode, {"latent_PKL": real(6, 40)}, "the pool is float32 (6, 40), must be [P, K, L]"),
    (mla_decode, {"table_BM": whole(2)}, "table is int32 (2,), must be [B, M]"),
    (mla_decode, {"table_BM": real(2, 3)}, "table is float32 (2, 3), must be int32"),
    (mla_decode, {"length_B": real(2)}, "length is float32 (2,), must be int32"),
    (mla_decode, {"q_BHL": whole(2, 4, 40), "latent_PKL": whole(6, 16, 40)}, "must be bfloat16 or float32"),
    (gqa_decode, {"k_PNKE": real(6, 2, 64), "v_PNKE": real(6, 2, 64)}, "k is float32 (6, 2, 64), must be [P, N, K, E]"),
    (gqa_decode, {"table_BM": whole(2, 0)}, "table is int32 (2, 0), must have no axis of size 0"),
    (gqa_decode, {"length_B": real(2)}, "length is float32 (2,), must be int32"),
    (gqa_prefill, {"q_TNGE": real(5, 6, 64)}, "q is float32 (5, 6, 64), must be [T, N, G, E]"),
    (gqa_prefill, {"v_PNKE": real(6, 2, 16)}, "v is float32 (6, 2, 16), must be [P, N, K, E]"),
    (gqa_prefill, {"table_RM": whole(0, 3)}, "table is int32 (0, 3), must have no axis of size 0"),
    (gqa_prefill, {"start_R": real(2)}, "start is float32 (2,), must be int32"),
    (mla_prefill, {"q_THE": real(5, 24)}, "q is float32 (5, 24), must be [T, H, E]"),
    (mla_prefill, {"key_up_HNR": real(16, 32)}, "key_up is float32 (16, 32), must be [H, nope, rank]"),
    (mla_prefill, {"value_up_HVR": real(4)}, "value_up is float32 (4,), must be [H, V, rank]"),
    (mla_prefill, {"position_R": real(2)}, "position is float32 (2,), must be int32"),
    (gate_up, {"x_TD": real(5, 32, 1)}, "x is float32 (5, 32, 1), must be [T, D]"),
    (gate_up, {"row_A": real(10)}, "row is float32 (10,), must be int32"),
    (gate_up, {"w_X2FD": real(0, 2, 16, 32)}, "w is float32 (0, 2, 16, 32), must have no axis of size 0"),
    (down, {"h_AF": real(16)}, "h is float32 (16,), must be [A, F]"),
    (down, {"size_X": real(3)}, "size is float32 (3,), must be int32"),
    (moe_route, {"logits_TX": real(8)}, "logits is float32 (8,), must be [T, X]"),
    (moe_route, {"first": 5}, "first is 5, must be from 0 to 4: 4 of 8 experts"),
    (sort_by_expert, {"expert_TJ": real(5, 2)}, "expert is float32 (5, 2), must be int32"),
    (combine, {"y_AD": real(10)}, "y is float32 (10,), must be [A, D]"),
    (combine, {"place_TJ": whole(10)}, "place is int32 (10,), must be [T, J]"),
    (kv_write, {"k_PNKE": real(6, 2, 64)}, "k is float32 (6, 2, 64), must be [P, N, K, E]"),
    (kv_write, {"qkv_TNSE": real(0, 2, 4, 64)}, "qkv is float32 (0, 2, 4, 64), must have no axis of size 0"),
    (kv_write, {"offset_T": real(5)}, "offset is float32 (5,), must be int32"),
    (kv_write, {"bias_NSE": real(2, 4, 64, dtype=BF16)}, "bias is bfloat16, must be float32 as the rows"),
    (
        kv_write,
        {"norm": QkNorm(real(64), real(64, dtype=BF16), 1e-5)},
        "scale is bfloat16, must be float32 as the rows",
    ),
    (latent_write, {"scale_R": real(32, 1)}, "scale is float32 (32, 1), must be [R]"),
    (latent_write, {"scale_R": real(32, dtype=BF16)}, "scale bfloat16 must have one dtype"),
    (latent_write, {"q_THE": real(5, 24)}, "q is float32 (5, 24), must be [T, H, E]"),
    (latent_write, {"page_T": real(5)}, "page is float32 (5,), must be int32"),
    (sample, {"x_BV": real(9)}, "x is float32 (9,), must be [B, V]"),
    (sample, {"x_BV": real(3, 0)}, "x is float32 (3, 0), must have no axis of size 0"),
)


@pytest.mark.parametrize("op", GOOD, ids=lambda op: op.__name__)
def test_the_good_calls_are_good(op: Callable[..., Any]) -> None:
    """Else a refusal below could be for another reason."""
    op(**GOOD[op])


@pytest.mark.parametrize(("op", "change", "sentence"), REFUSED)
def test_one_sentence_that_names_the_argument(op: Callable[..., Any], change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        op(**GOOD[op] | change)
    assert sentence in str(raised.value) and str(raised.value).endswith(".") and "\n" not in str(raised.value)


def test_either_of_two_forms() -> None:
    require("op", "x", real(2, 3), "A B", "A B C")
    require("op", "x", real(2, 3, 4), "A B", "A B C")
    with pytest.raises(ValueError, match=r"^op: x is float32 \(2,\), must be \[A, B\] or \[A, B, C\]\.$"):
        require("op", "x", real(2), "A B", "A B C")
