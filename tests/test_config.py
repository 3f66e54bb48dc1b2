"""Flags to configuration: flat names, ranges, what `resolve` fills in, and the budget of fields."""

from __future__ import annotations

from dataclasses import fields

import pytest

from jaxserve.cli import build_parser, options_from
from jaxserve.config import (
    Config,
    DeviceFacts,
    ModelConfig,
    RuntimeConfig,
    ScheduleConfig,
    decode_buckets,
    mixed_buckets,
    resolve,
)
from jaxserve.engine.buckets import Buckets
from jaxserve.errors import ConfigError
from jaxserve.options import PLACES, EngineOptions, config_from_options

CPU = DeviceFacts("cpu", "cpu", 1, 8192, "bfloat16")
H200 = DeviceFacts("cuda", "NVIDIA H200", 1, 8192, "bfloat16")


def test_every_option_has_a_place_in_the_tree() -> None:
    assert EngineOptions.__annotations__.keys() <= PLACES.keys()
    config = Config(ModelConfig("m"))
    for part, field in PLACES.values():
        assert hasattr(getattr(config, part), field)


def test_the_tree_stays_small() -> None:
    parts = [getattr(Config(ModelConfig("m")), part.name) for part in fields(Config)]
    assert sum(len(fields(part)) for part in parts) <= 40


def test_flat_options_land_in_their_parts() -> None:
    config = config_from_options("m", {"block_size": 32, "cache_memory_gb": 1.5, "load_format": "dummy", "port": 0})
    assert (config.cache.page_size_tokens, config.cache.cache_memory_bytes) == (32, 1_500_000_000)
    assert config.model.random_weights and config.server.port == 0


def test_the_prefix_cache_is_on_and_goes_by_two_names() -> None:
    assert config_from_options("m", {}).cache.prefix_cache
    assert not config_from_options("m", {"enable_prefix_caching": False}).cache.prefix_cache
    for flag in ("--no-prefix-cache", "--no-enable-prefix-caching"):
        args = build_parser().parse_args(["serve", "m", flag, "--prefix-cache-eviction", "lfu"])
        cache = config_from_options("m", options_from(args)).cache
        assert (cache.prefix_cache, cache.prefix_cache_eviction) == (False, "lfu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seqs": 3}, "max_seqs: no such option, allowed: attention, "),
        ({"load_format": "gguf"}, "--load-format: got 'gguf', allowed: auto, dummy"),
        ({"dtype": "int8"}, "--dtype: got 'int8', allowed: one of auto, bfloat16, float32"),
        ({"max_model_len": 0}, "--max-model-len: got 0, allowed: at least 1"),
        ({"max_model_len": 9000}, "--max-model-len: got 9000, allowed: at most 8192"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization: got 1.5, allowed: 0 < x <= 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, "--max-num-batched-tokens: got 64, allowed: more than"),
        ({"expert_parallel_size": 0}, "--expert-parallel-size: got 0, allowed: at least 1"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "--tensor-parallel-size x --expert-parallel-size x --data-parallel-size: got 2 x 1 x 2 = 4",
        ),
        ({"prefix_cache_eviction": "mru"}, "--prefix-cache-eviction: got 'mru', allowed: one of lru, lfu, priority"),
        ({"block_size": 48}, "--block-size: got 48, allowed: 8, 16, 32, 64, 128"),
        ({"port": 70000}, "--port: got 70000, allowed: 0 to 65535"),
        ({"metrics_port": 70000}, "--metrics-port: got 70000, allowed: 0 to 65535"),
        ({"max_message_mb": 4096.0}, "--max-message-mb: got 4096.0, allowed: more than 0, less than 2048"),
        ({"max_message_mb": float("inf")}, "--max-message-mb: got inf, allowed: a number above 0"),
        ({"cache_memory_gb": float("nan")}, "--cache-memory-gb: got nan, allowed: a number above 0"),
        ({"cache_memory_gb": 0.0}, "--cache-memory-gb: got 0.0, allowed: a number above 0"),
        ({"drain_timeout": -1.0}, "--drain-timeout: got -1.0, allowed: 0 or more seconds"),
        ({"drain_timeout": float("nan")}, "--drain-timeout: got nan, allowed: 0 or more seconds"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config_from_options("m", options), CPU)
    assert str(error.value).startswith(sentence)


def test_resolve_fills_every_auto_and_says_so() -> None:
    config, lines = resolve(config_from_options("m", {}), CPU)
    assert (config.model.dtype, config.model.max_model_len, config.cache.page_size_tokens) == ("float32", 8192, 16)
    assert "model.dtype: auto -> float32" in lines
    again, silence = resolve(config, CPU)
    assert again == config and silence == []
    on_gpu, _ = resolve(config_from_options("m", {}), H200)
    assert (on_gpu.model.dtype, on_gpu.cache.page_size_tokens, on_gpu.runtime.device) == ("bfloat16", 64, "cuda")


def test_buckets_end_in_the_limit() -> None:
    assert decode_buckets(64) == (16, 32, 64) and decode_buckets(64, "cpu") == (1, 4, 16, 64)
    assert decode_buckets(5) == (5,) and decode_buckets(1, "cpu") == (1,)
    assert mixed_buckets(2048) == (64, 256, 1024, 2048) and mixed_buckets(2048, "cpu") == (64, 512, 2048)
    assert mixed_buckets(40) == (40,)


def test_a_deterministic_engine_has_one_size_of_decode_steps() -> None:
    config, _ = resolve(config_from_options("m", {"deterministic": True}), H200)
    assert (config.runtime.decode_buckets, config.runtime.mixed_buckets) == ((64,), (64, 256, 1024, 2048))
    buckets = Buckets.from_config(RuntimeConfig(deterministic=True), ScheduleConfig())
    assert (buckets.decode_rows, buckets.mixed_tokens) == ((64,), (64, 256, 1024, 2048))


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "expert_parallel_size": 2}])
def test_a_deterministic_engine_adds_up_over_two_devices_at_most(sizes: dict[str, int]) -> None:
    many = DeviceFacts("cuda", "NVIDIA H200", 8, 8192, "bfloat16")
    resolve(config_from_options("m", sizes), many)
    resolve(config_from_options("m", {"deterministic": True, "tensor_parallel_size": 2, "data_parallel_size": 4}), many)
    with pytest.raises(ConfigError, match="expert-parallel-size: got 4, allowed: at most 2 with --deterministic"):
        resolve(config_from_options("m", {"deterministic": True} | sizes), many)
