"""The one configuration tree: built from flags by `cli`, resolved once by `app`, each part given only to its room."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from jaxserve.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32")
EVICTIONS = ("lru", "lfu", "priority")
POLICIES = ("fcfs", "priority", "shortest-first", "longest-prefix-match")
MOST_SUMMED = 2  # devices under --deterministic: the sum of two numbers has no order


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is served. `model` is a Hugging Face directory, a GGUF file, or a converted checkpoint."""

    model: str
    tokenizer: str | None = None  # a directory; None: the model's own
    served_model_name: str | None = None  # None: the last part of `model`
    dtype: str = "auto"  # auto: the checkpoint's own on a GPU, float32 on the CPU
    max_model_len: int | None = None  # tokens; None: the model's own limit, cut to what the pool can hold
    random_weights: bool = False  # N(0, 0.02) and norms 1, made on the device; no weight file is read
    seed: int = 0  # of random weights


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged cache. The pool's size comes from the first of: num_pages, cache_memory_bytes, memory utilization."""

    page_size_tokens: int = 64
    num_pages: int | None = None
    cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True  # full pages stay after their sequence's end, for prompts that begin alike
    prefix_cache_eviction: str = "lru"  # what goes first where pages are short: lru | lfu | priority


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Limits of a step and of the queue."""

    max_num_seqs: int = 64  # request slots: sequences that run at once; of each lane under data parallelism
    max_num_batched_tokens: int = 2048  # token budget of a step, of each lane
    max_num_chunks: int = 16  # prompts that one mixed step may take a chunk of
    max_queue_requests: int = 4096  # waiting requests; more are refused
    policy: str = "fcfs"  # who goes first, see engine/policy.py
    step_timeout_s: float = 120.0  # a step with work pending that takes longer makes the health check fail


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """How the step is compiled and placed."""

    device: str = "auto"  # auto | cpu | cuda
    tensor_parallel_size: int = 1  # devices that share each layer's heads and widths
    expert_parallel_size: int = 1  # devices that share out the experts; attention is cut over them too where it divides
    data_parallel_size: int = 1  # lanes: each has sequences and cache of its own
    compile_cache_dir: str | None = None  # None: a folder of the user's cache directory; "": no cache
    attention: str = "auto"  # a forced implementation of the attention ops, by registry name
    deterministic: bool = False  # a request's tokens and logprobs are the same to the bit in any company
    decode_buckets: tuple[int, ...] = ()  # batch sizes; empty: chosen from max_num_seqs
    mixed_buckets: tuple[int, ...] = ()  # token counts; empty: chosen from max_num_batched_tokens
    max_logprobs: int = 20
    lower_processes: int | None = None  # that lower programs at a cold start; 0: this one; None: by the host's cores

    @property
    def mesh_sizes(self) -> tuple[int, int, int]:
        """Devices along the mesh's axes tensor, expert and data."""
        return self.tensor_parallel_size, self.expert_parallel_size, self.data_parallel_size


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC service."""

    host: str = "127.0.0.1"
    port: int = 50051  # 0: a free one, printed at start
    metrics_port: int | None = None  # None: no metrics endpoint; 0: a free one
    max_message_bytes: int = 64 << 20
    drain_timeout_s: float = 30.0
    max_n: int = 128  # choices a request may ask for


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What `app` found out about the device and the model before anything is allocated."""

    platform: str  # cpu | cuda
    device_kind: str  # "NVIDIA H200", "cpu"
    num_devices: int
    model_max_len: int  # tokens, from the model's config
    checkpoint_dtype: str  # bfloat16 | float16 | float32


def resolve(config: Config, facts: DeviceFacts) -> tuple[Config, list[str]]:
    """Fill every "auto" and check every range; pure.

    Returns the resolved tree and one line for each field that changed ("model.dtype: auto -> float32"), for the log.
    Raises ConfigError with the flag, the value given and what is allowed.
    """
    check_ranges(config)
    model, cache, runtime = config.model, config.cache, config.runtime
    if model.dtype == "auto":
        on_cpu = facts.platform == "cpu"  # XLA:CPU has no fast bf16 product
        model = replace(model, dtype="float32" if on_cpu or facts.checkpoint_dtype == "float32" else "bfloat16")
    if model.max_model_len is None:
        model = replace(model, max_model_len=facts.model_max_len)
    elif model.max_model_len > facts.model_max_len:
        raise ConfigError(
            f"--max-model-len: got {model.max_model_len}, allowed: at most {facts.model_max_len}, "
            "the model's own max_position_embeddings"
        )
    if facts.platform == "cpu" and cache.page_size_tokens == CacheConfig().page_size_tokens:
        cache = replace(cache, page_size_tokens=16)  # small pages waste less of a small pool
    if runtime.device == "auto":
        runtime = replace(runtime, device=facts.platform)
    sizes = runtime.mesh_sizes
    if math.prod(sizes) > facts.num_devices:
        raise ConfigError(
            "--tensor-parallel-size x --expert-parallel-size x --data-parallel-size: got "
            f"{' x '.join(map(str, sizes))} = {math.prod(sizes)}, allowed: at most {facts.num_devices}, "
            "the number of devices"
        )
    schedule = config.schedule
    if not runtime.decode_buckets:
        seqs = schedule.max_num_seqs
        sizes = (seqs,) if runtime.deterministic else decode_buckets(seqs, facts.platform)
        runtime = replace(runtime, decode_buckets=sizes)
    if not runtime.mixed_buckets:
        runtime = replace(runtime, mixed_buckets=mixed_buckets(schedule.max_num_batched_tokens, facts.platform))
    resolved = replace(config, model=model, cache=cache, runtime=runtime)
    return resolved, changed_fields(config, resolved)


def check_ranges(config: Config) -> None:
    """Raise ConfigError for the first flag that is out of range."""
    model, cache, schedule = config.model, config.cache, config.schedule
    runtime, server = config.runtime, config.server
    message_mb = server.max_message_bytes / 2**20
    summed = runtime.tensor_parallel_size * runtime.expert_parallel_size
    checks: list[tuple[str, object, bool, str]] = [
        ("--dtype", model.dtype, model.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        ("--max-model-len", model.max_model_len, model.max_model_len is None or model.max_model_len > 0, "at least 1"),
        ("--block-size", cache.page_size_tokens, cache.page_size_tokens in (8, 16, 32, 64, 128), "8, 16, 32, 64, 128"),
        ("--gpu-memory-utilization", cache.gpu_memory_utilization, 0 < cache.gpu_memory_utilization <= 1, "0 < x <= 1"),
        ("--num-pages", cache.num_pages, cache.num_pages is None or cache.num_pages > 0, "at least 1"),
        (
            "--prefix-cache-eviction",
            cache.prefix_cache_eviction,
            cache.prefix_cache_eviction in EVICTIONS,
            f"one of {', '.join(EVICTIONS)}",
        ),
        (
            "--scheduling-policy",
            schedule.policy,
            schedule.policy in POLICIES,
            f"one of {', '.join(POLICIES)}",
        ),
        ("--max-num-seqs", schedule.max_num_seqs, 1 <= schedule.max_num_seqs <= 4096, "1 to 4096"),
        (
            "--max-num-batched-tokens",
            schedule.max_num_batched_tokens,
            schedule.max_num_batched_tokens > schedule.max_num_seqs,
            f"more than --max-num-seqs ({schedule.max_num_seqs}), so that prompts advance while all sequences decode",
        ),
        *(
            (f"--{name}-parallel-size", size, size >= 1, "at least 1")
            for name, size in zip(("tensor", "expert", "data"), runtime.mesh_sizes, strict=True)
        ),
        (
            "--tensor-parallel-size x --expert-parallel-size",
            summed,
            summed <= MOST_SUMMED or not runtime.deterministic,
            f"at most {MOST_SUMMED} with --deterministic: with more, the order of a sum depends on a row's place",
        ),
        ("--device", runtime.device, runtime.device in ("auto", "cpu", "cuda"), "auto, cpu, cuda"),
        (
            "--lower-processes",
            runtime.lower_processes,
            runtime.lower_processes is None or runtime.lower_processes >= 0,
            "at least 0",
        ),
        ("--port", server.port, 0 <= server.port < 65536, "0 to 65535"),
        ("--metrics-port", server.metrics_port, 0 <= (server.metrics_port or 0) < 65536, "0 to 65535"),
        ("--max-message-mb", message_mb, 0 < message_mb < 2048, "more than 0, less than 2048"),
        ("--drain-timeout", server.drain_timeout_s, 0 <= server.drain_timeout_s < float("inf"), "0 or more seconds"),
    ]
    for flag, given, good, allowed in checks:
        if not good:
            raise ConfigError(f"{flag}: got {given!r}, allowed: {allowed}")


def decode_buckets(max_num_seqs: int, platform: str = "cuda") -> tuple[int, ...]:
    """Batch sizes of the decode programs, ending in `max_num_seqs` itself.

    On a GPU powers of two from 16: XLA's products with fewer rows are slower than with 16. On the CPU powers of four,
    since compiling takes longer there than the rows of padding.
    """
    first, factor = (16, 2) if platform == "cuda" else (1, 4)
    sizes = [size for i in range(13) if (size := first * factor**i) < max_num_seqs]
    return (*sizes, max_num_seqs)


def mixed_buckets(max_num_batched_tokens: int, platform: str = "cuda") -> tuple[int, ...]:
    """Token counts of the mixed programs, ending in the budget itself: 64, then times 4 (times 8 on the CPU)."""
    factor = 4 if platform == "cuda" else 8
    sizes = [size for i in range(6) if (size := 64 * factor**i) < max_num_batched_tokens]
    return (*sizes, max_num_batched_tokens)


def changed_fields(before: Config, after: Config) -> list[str]:
    """One line for each leaf that differs: "cache.page_size_tokens: 64 -> 16"."""
    lines = []
    for part in fields(Config):
        old, new = getattr(before, part.name), getattr(after, part.name)
        for leaf in fields(old):
            was, now = getattr(old, leaf.name), getattr(new, leaf.name)
            if was != now:
                lines.append(f"{part.name}.{leaf.name}: {was} -> {now}")
    return lines
