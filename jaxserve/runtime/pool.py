"""How many pages the cache gets: from what is free once weights and workspace are accounted for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ConfigError, DeviceError


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
