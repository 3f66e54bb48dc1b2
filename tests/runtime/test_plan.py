"""The pool's size before anything is compiled: the estimate of the workspace, and what follows where it is too low."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import CacheConfig, Config, DeviceFacts, ModelConfig, RuntimeConfig, ScheduleConfig, resolve
from jaxserve.engine.buckets import Buckets
from jaxserve.errors import DeviceError
from jaxserve.mesh import Placement, make_mesh
from jaxserve.models.decoder import fit_spec, split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime import start
from jaxserve.runtime.compile import compile_all
from jaxserve.runtime.lower import largest_first
from jaxserve.runtime.pool import estimate_workspace_bytes
from jaxserve.runtime.start import Order, compile_plan, make_plan
from tests.fakes.tiny import CONFIG

CONFIGS = Path(__file__).parents[2] / "scripts" / "configs"

# Model, tokens and sequences of a step, tokens of a sequence, devices, and the bytes of temporaries that XLA reports
# for the largest program on an H200 (two or three layers; the number of layers changes nothing).
MEASURED = (
    ("glm-4-9b-0414", 8192, 64, 8192, 1, 810e6),
    ("glm-4-9b-0414", 16384, 64, 8192, 1, 1485e6),
    ("glm-4-9b-0414", 2048, 256, 8192, 1, 504e6),
    ("glm-4-9b-0414", 8192, 64, 8192, 2, 540e6),
    ("llama-2-13b", 8192, 64, 4096, 1, 936e6),
    ("smollm2-135m", 8192, 256, 8192, 1, 164e6),
    ("deepseek-v2-lite", 8192, 64, 8192, 1, 2269e6),
    ("deepseek-v2-lite", 1024, 512, 8192, 1, 2165e6),
    ("deepseek-v2-lite", 8192, 64, 256, 1, 641e6),
    ("deepseek-v2-lite", 8192, 64, 8192, 4, 1349e6),
    ("glm-4.7-flash", 8192, 64, 8192, 1, 2385e6),
)


@pytest.mark.parametrize(("name", "tokens", "seqs", "length", "devices", "needed_bytes"), MEASURED)
def test_the_estimate_suffices_and_wastes_little(
    name: str, tokens: int, seqs: int, length: int, devices: int, needed_bytes: float
) -> None:
    spec = model_spec(json.loads((CONFIGS / name / "config.json").read_text()))
    wanted = Config(
        ModelConfig(name, random_weights=True, max_model_len=length),
        schedule=ScheduleConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_num_chunks=64),
        runtime=RuntimeConfig(tensor_parallel_size=devices),
    )
    config, _ = resolve(wanted, DeviceFacts("cuda", "", devices, spec.max_len, "bfloat16"))
    placement = Placement(tensor=devices)
    estimate_bytes = estimate_workspace_bytes(fit_spec(spec, placement), config, placement)
    assert 1.1 * needed_bytes < estimate_bytes < needed_bytes + 1.3e9  # of an H200's 138e9


@dataclass
class Program:
    """What is asked of a compiled program here."""

    temp_bytes: int

    def memory_analysis(self) -> SimpleNamespace:
        return SimpleNamespace(temp_size_in_bytes=self.temp_bytes)


def order_with(limit_bytes: int, **cache: Any) -> Order:
    """The tiny model on a device of so much memory, which is called a GPU."""
    wanted = Config(
        ModelConfig("tiny", random_weights=True, max_model_len=256),
        cache=CacheConfig(**cache),
        schedule=ScheduleConfig(max_num_seqs=1024, max_num_batched_tokens=2048),
        runtime=RuntimeConfig(compile_cache_dir=""),
    )
    spec = model_spec(CONFIG)
    config, _ = resolve(wanted, DeviceFacts("cuda", "", 1, spec.max_len, "float32"))
    mesh = make_mesh(jax.devices())
    split = split_decoder(spec, jnp.dtype(config.model.dtype), mesh)
    buckets = largest_first(Buckets.from_config(config.runtime, config.schedule).all())
    return Order(split.spec, split, config, buckets, mesh, 120, limit_bytes)


def compile_with(order: Order, temp_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Plan and "compile" programs that need this: how many pages each try had, and the workspace of the last."""
    tries: list[int] = []

    def compiled(shelf: Any, lowerings: dict, threads: int, progress: Any, check: Callable) -> tuple[dict, set]:
        lines = next(iter(lowerings.values())).arguments[1].caches  # the pool, in every program's shapes
        tries.append(jax.tree.leaves(lines)[0].shape[0])
        programs = {name: Program(temp_bytes if name.startswith("scored") else 0) for name in lowerings}
        for program in programs.values():
            check(program)
        return programs, set()

    monkeypatch.setattr(start, "load_or_compile", compiled)
    with ExitStack() as workers:
        plan, _, _ = compile_plan(order, make_plan(order, workers), workers, lambda _: None)
    assert plan.options.shape.num_pages == tries[-1]
    return tries, plan.workspace_bytes


def test_a_step_that_needs_more_than_was_estimated_makes_the_cache_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_with(400 << 20)
    estimate_bytes = estimate_workspace_bytes(order.spec, order.config, order.split.placement)
    (first,), kept_bytes = compile_with(order, estimate_bytes, monkeypatch)
    assert kept_bytes == estimate_bytes
    (again, smaller), kept_bytes = compile_with(order, estimate_bytes + (30 << 20), monkeypatch)
    assert again == first > smaller
    assert kept_bytes >= estimate_bytes + (30 << 20)
    with pytest.raises(DeviceError, match="no memory is left for the cache"):
        compile_with(order, 400 << 20, monkeypatch)


def test_a_cache_of_a_given_size_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, _ = compile_with(order_with(600 << 20, num_pages=40), 500 << 20, monkeypatch)
    assert tries == [40]


def test_an_error_ends_the_compilation_of_all() -> None:
    """What waits for a thread is dropped, and nothing more is lowered."""
    lowered: list[int] = []

    def lower(key: int) -> Any:
        lowered.append(key)
        time.sleep(0.05)
        return SimpleNamespace(compile=lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        compile_all({key: partial(lower, key) for key in range(50)}, 1, lambda *_: None)
    assert len(lowered) < 10
