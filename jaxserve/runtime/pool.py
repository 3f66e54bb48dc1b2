"""How many pages the cache gets: from what is free once weights and an estimate of the workspace are accounted for."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.errors import ConfigError, DeviceError
from jaxserve.layers.mla import MlaSpec
from jaxserve.mesh import Placement
from jaxserve.models.spec import ModelSpec

SCORED_ROWS = 256  # of logits in a scored step, at least
LOGITS_COPIES = 3.5  # in float32: 3.25 where they are sampled, 3 where they are scored
EXPANDED_BYTES = 2 << 30  # that MLA prefill expands keys and values into, if one head's fit
MARGIN, SPARE_BYTES = 1.1, 256 << 20  # of the estimate; the spare is for what GEMMs and sorts want on top


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the pool is sized from; bytes are those of one device."""

    page_bytes: int  # one page of every layer
    page_size_tokens: int
    max_model_len: int  # tokens of the longest request
    max_num_seqs: int
    num_pages: int | None  # a fixed number wins,
    cache_memory_bytes: int | None  # then a fixed size,
    utilization: float  # then this share of the device's memory, less what is used


def pages_per_sequence(request: PoolRequest) -> int:
    """Pages of a request as long as max_model_len."""
    return -(-request.max_model_len // request.page_size_tokens)


def pool_pages(request: PoolRequest, limit_bytes: int, used_bytes: int, workspace_bytes: int) -> int:
    """Number of pages; never more than all slots could use.

    Raises DeviceError where not even one page fits, with the sum; ConfigError where a fixed size is too small.
    """
    most = request.max_num_seqs * pages_per_sequence(request)
    if request.num_pages is not None:
        return request.num_pages
    if request.cache_memory_bytes is not None:
        pages = request.cache_memory_bytes // request.page_bytes
        if pages < 1:
            raise ConfigError(
                f"--cache-memory-gb: got {request.cache_memory_bytes / 1e9:.3f}, allowed: at least "
                f"{request.page_bytes / 1e9:.3f}, one page of {request.page_size_tokens} tokens"
            )
        return min(pages, most)
    left_bytes = int(limit_bytes * request.utilization) - used_bytes - workspace_bytes
    pages = left_bytes // request.page_bytes
    if pages < 1:
        raise DeviceError(
            f"no memory is left for the cache: {limit_bytes / 1e9:.2f} GB x {request.utilization} "
            f"- weights and state {used_bytes / 1e9:.2f} GB - workspace {workspace_bytes / 1e9:.2f} GB "
            f"= {left_bytes / 1e9:.2f} GB, and one page takes {request.page_bytes / 1e9:.4f} GB; "
            "raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return min(pages, most)


def estimate_workspace_bytes(spec: ModelSpec, config: Config, placement: Placement) -> int:
    """A generous guess of the largest program's temporaries on a device: what its widest part keeps at once, and more.

    It decides the pool's size before anything is compiled, so that nothing waits for the first program. One that is too
    low costs a second compilation of all of them, one that is too high some pages. See NOTES.md for how well it fits.
    """
    item_bytes = jnp.dtype(config.model.dtype).itemsize
    tokens, rows = config.schedule.max_num_batched_tokens, max(config.schedule.max_num_seqs, SCORED_ROWS)

    def part(logical: str, dimension: int) -> int:
        return dimension // placement.size(placement.axes(logical, dimension))

    elements = [part("mlp", spec.mlp_width) * 3 + spec.hidden_size * 3]
    if spec.moe is not None:
        width = part("expert_mlp", spec.moe.width)
        elements.append((spec.moe.grouped_shared + spec.moe.rule.top_k) * (3 * width + 2 * spec.hidden_size))
    parts_bytes = [tokens * max(elements) * item_bytes]
    parts_bytes.append(int(rows * part("vocab", spec.vocab_size) * 4 * LOGITS_COPIES))
    parts_bytes.append(attention_bytes(spec, config, part("heads", spec.attention.num_heads), item_bytes))
    return int(max(parts_bytes) * MARGIN) + SPARE_BYTES


def attention_bytes(spec: ModelSpec, config: Config, heads: int, item_bytes: int) -> int:
    """Queries, keys, values and results of a step's tokens; MLA's prefill has those of whole contexts too."""
    attention, tokens = spec.attention, config.schedule.max_num_batched_tokens
    if not isinstance(attention, MlaSpec):
        return tokens * 4 * heads * attention.head_dim * item_bytes
    own_bytes = tokens * heads * (attention.head_dim + attention.nope_dim + 2 * attention.value_dim) * item_bytes
    row_bytes = (attention.nope_dim + attention.value_dim) * item_bytes
    chunks = min(config.schedule.max_num_chunks, config.schedule.max_num_seqs)
    head_bytes = chunks * (config.model.max_model_len or spec.max_len) * row_bytes
    return own_bytes + min(max(EXPANDED_BYTES, head_bytes), head_bytes * heads)
