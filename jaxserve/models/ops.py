"""Which kernels a model's step calls, and with what sizes: for `jaxserve explain` and the start log."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.mla import MlaSpec
from jaxserve.layers.moe import MoeSpec
from jaxserve.mesh import Placement
from jaxserve.models.spec import ModelSpec
from pallas_kernels.dense_gemm.contract import DenseGemmShapes
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.gqa_prefill.contract import GqaPrefillShapes
from pallas_kernels.grouped_gemm.contract import GroupedGemmShapes
from pallas_kernels.kv_write.contract import KvWriteShapes
from pallas_kernels.latent_write.contract import LatentWriteShapes
from pallas_kernels.mla_decode.contract import MlaDecodeShapes
from pallas_kernels.mla_prefill.contract import MlaPrefillShapes
from pallas_kernels.moe_route.contract import MoeRouteShapes
from pallas_kernels.sampling.contract import SamplingShapes


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step of an engine."""

    tokens: int
    rows: int  # that decode
    chunks: int
    page_tokens: int
    max_pages: int  # of a block table row
    dtype: str


def op_shapes(spec: ModelSpec, placement: Placement, sizes: StepSizes) -> dict[str, object]:
    """Op -> its own record of sizes, on each device."""
    attention = spec.attention
    found = gqa_ops(attention, placement, sizes) if isinstance(attention, GqaSpec) else {}
    if isinstance(attention, MlaSpec):
        found = mla_ops(attention, placement, sizes)
    if spec.moe is None or spec.first_dense:
        width = spec.mlp_width // placement.size(placement.axes("mlp", spec.mlp_width))
        found["dense_gemm"] = DenseGemmShapes(sizes.rows, width, spec.hidden_size, sizes.dtype, "float32")
    if spec.moe:
        found |= moe_ops(spec.moe, spec.hidden_size, placement, sizes)
    if not placement.axes("vocab", spec.vocab_size):  # where it is cut, the runtime draws by itself
        found["sampling"] = SamplingShapes(sizes.rows, spec.vocab_size, logits=True)
    return found


def gqa_ops(spec: GqaSpec, placement: Placement, sizes: StepSizes) -> dict[str, object]:
    """Of grouped-query attention."""
    kv_heads = spec.num_kv_heads // placement.size(placement.axes("kv_heads", spec.num_kv_heads))
    heads, pages = (kv_heads, spec.group, spec.head_dim), (sizes.page_tokens, sizes.max_pages, sizes.dtype)
    return {
        "gqa_decode": GqaDecodeShapes(sizes.rows, *heads, *pages),
        "gqa_prefill": GqaPrefillShapes(sizes.tokens, sizes.chunks, *heads, *pages),
        "kv_write": KvWriteShapes(
            rows=sizes.tokens,
            kv_heads=kv_heads,
            group=spec.group,
            head_dim=spec.head_dim,
            page_tokens=sizes.page_tokens,
            rotary=spec.rope.rotary,
            bias=spec.qkv_bias,
            norm=spec.qk_norm_eps is not None,
            dtype=sizes.dtype,
        ),
    }


def mla_ops(spec: MlaSpec, placement: Placement, sizes: StepSizes) -> dict[str, object]:
    """Of latent attention."""
    heads = spec.num_heads // placement.size(placement.axes("heads", spec.num_heads))
    pages, rope_dim = (sizes.page_tokens, sizes.max_pages, sizes.dtype), spec.rope.rotary_dims
    parts = (spec.nope_dim, rope_dim, spec.value_dim, spec.rank)
    return {
        "mla_decode": MlaDecodeShapes(sizes.rows, heads, spec.cached_dim, spec.rank, *pages),
        "mla_prefill": MlaPrefillShapes(sizes.tokens, sizes.chunks, heads, *parts, *pages),
        "latent_write": LatentWriteShapes(
            rows=sizes.tokens,
            heads=heads,
            head_dim=spec.head_dim,
            width=(spec.q_rank or 0) + spec.cached_dim,
            rank=spec.rank,
            page_tokens=sizes.page_tokens,
            rotary=spec.rope.rotary,
            dtype=sizes.dtype,
        ),
    }


def moe_ops(spec: MoeSpec, hidden: int, placement: Placement, sizes: StepSizes) -> dict[str, object]:
    """Of a mixture of experts; the grouped product named is that of gate and up."""
    experts = spec.num_experts // placement.size(placement.axes("experts", spec.num_experts))
    width = spec.width // placement.size(placement.axes("expert_mlp", spec.width))
    shared = spec.grouped_shared
    rows = sizes.tokens * (shared + spec.rule.top_k)
    return {
        "moe_route": MoeRouteShapes(sizes.tokens, spec.num_experts, experts, spec.rule, spec.bias, shared),
        "grouped_gemm": GroupedGemmShapes(rows, shared + experts, 2, hidden, width, sizes.dtype),
    }
