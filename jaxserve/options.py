"""The flat names that users know (vLLM's, where it has them) -> the configuration tree; for the flags and for LLM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypedDict

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError, shorten


class EngineOptions(TypedDict, total=False):
    """What shapes the engine; each is a flag too, with dashes. Unset ones have the defaults of `config`."""

    tokenizer: str | None  # a directory with tokenizer files; None: the model's own
    served_model_name: str | None
    dtype: str  # auto, bfloat16, float32
    max_model_len: int | None  # tokens of prompt and output together; None: the model's limit
    load_format: str  # auto; dummy: random weights, no weight file is read
    seed: int  # of random weights
    max_num_seqs: int  # sequences that run at once, for each data-parallel rank
    max_num_batched_tokens: int  # token budget of a step, for each data-parallel rank
    max_queue_requests: int  # waiting requests; more are refused
    scheduling_policy: str  # fcfs, priority, shortest-first, longest-prefix-match
    block_size: int  # tokens of a cache page
    num_pages: int | None  # pages of the cache; None: from the memory that is free
    cache_memory_gb: float | None  # size of the cache; None: from the memory that is free
    gpu_memory_utilization: float
    prefix_cache: bool  # prompts share cached pages of those that began alike; on unless it is turned off
    enable_prefix_caching: bool  # the same, as vLLM calls it
    prefix_cache_eviction: str  # lru, lfu, priority
    device: str  # auto, cpu, cuda
    tensor_parallel_size: int  # devices that share each layer's heads and widths
    expert_parallel_size: int  # devices that share out the experts
    data_parallel_size: int  # ranks that each have sequences and cache of their own
    attention: str  # a forced kernel implementation; see `jaxserve explain`
    deterministic: bool  # the same tokens and logprobs to the bit, whatever else runs; slower
    compile_cache_dir: str  # "": none
    lower_processes: int | None  # processes that lower programs at a cold start; 0: none; None: by the host's cores


PLACES: dict[str, tuple[str, str]] = {
    "tokenizer": ("model", "tokenizer"),
    "served_model_name": ("model", "served_model_name"),
    "dtype": ("model", "dtype"),
    "max_model_len": ("model", "max_model_len"),
    "load_format": ("model", "random_weights"),
    "seed": ("model", "seed"),
    "max_num_seqs": ("schedule", "max_num_seqs"),
    "max_num_batched_tokens": ("schedule", "max_num_batched_tokens"),
    "max_queue_requests": ("schedule", "max_queue_requests"),
    "scheduling_policy": ("schedule", "policy"),
    "block_size": ("cache", "page_size_tokens"),
    "num_pages": ("cache", "num_pages"),
    "cache_memory_gb": ("cache", "cache_memory_bytes"),
    "gpu_memory_utilization": ("cache", "gpu_memory_utilization"),
    "prefix_cache": ("cache", "prefix_cache"),
    "enable_prefix_caching": ("cache", "prefix_cache"),
    "prefix_cache_eviction": ("cache", "prefix_cache_eviction"),
    "device": ("runtime", "device"),
    "tensor_parallel_size": ("runtime", "tensor_parallel_size"),
    "expert_parallel_size": ("runtime", "expert_parallel_size"),
    "data_parallel_size": ("runtime", "data_parallel_size"),
    "attention": ("runtime", "attention"),
    "deterministic": ("runtime", "deterministic"),
    "compile_cache_dir": ("runtime", "compile_cache_dir"),
    "lower_processes": ("runtime", "lower_processes"),
    "host": ("server", "host"),
    "port": ("server", "port"),
    "metrics_port": ("server", "metrics_port"),
    "max_message_mb": ("server", "max_message_bytes"),
    "drain_timeout": ("server", "drain_timeout_s"),
}
LOAD_FORMATS = ("auto", "dummy")


def config_from_options(model: str, options: dict[str, Any]) -> Config:
    """The tree with the given options set. Raises ConfigError for an unknown name, or an unknown load format."""
    unknown = sorted(options.keys() - PLACES.keys())
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such option, allowed: {', '.join(sorted(PLACES))}")
    config = Config(ModelConfig(str(model)))
    for name, value in options.items():
        part, field = PLACES[name]
        changed = replace(getattr(config, part), **{field: convert(name, value)})
        config = replace(config, **{part: changed})
    return config


def convert(name: str, value: Any) -> Any:
    """From the user's unit to the tree's."""
    if name == "load_format":
        if value not in LOAD_FORMATS:
            raise ConfigError(f"--load-format: got {shorten(value)}, allowed: {', '.join(LOAD_FORMATS)}")
        return value == "dummy"
    if name in ("cache_memory_gb", "max_message_mb"):
        if value is None:
            return None
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, allowed: a number above 0")
        return int(value * (1e9 if name == "cache_memory_gb" else 2**20))
    return value
