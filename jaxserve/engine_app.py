"""Wires the engine: model files -> spec -> runner -> Engine; and is the main module of the engine's own process.

The only wiring beside `app`, kept apart so that the front's process never imports JAX.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jax

from checkpoints.source import ModelSource, open_model
from jaxserve.config import Config, DeviceFacts, resolve
from jaxserve.engine.admission import PIECE_TOKENS
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.loop import Engine
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.mesh import Placement
from jaxserve.models.decoder import fit_spec
from jaxserve.models.families import model_spec
from jaxserve.models.ops import StepSizes, op_shapes
from jaxserve.models.spec import ModelSpec
from jaxserve.request import EngineStats, EventBatch
from jaxserve.runtime.runner import StepRunner
from jaxserve.runtime.start import Progress, devices_for, start_runner
from jaxserve.server.link import EngineFacts, EngineSide
from jaxserve.text.tokenizer import load_tokenizer
from pallas_kernels.device import device_of
from pallas_kernels.registry import KernelChoiceError, Row, explain

log = logging.getLogger("jaxserve.engine")

ATTENTION_OPS = frozenset({"gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill"})  # what --attention forces


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A warm engine and what others must know of it."""

    engine: Engine
    runner: StepRunner
    facts: EngineFacts
    config: Config  # resolved
    times_s: dict[str, float]

    def stats(self) -> EngineStats:
        """The engine's figures with the runner's."""
        return dataclasses.replace(
            self.engine.stats(), compilations_after_warmup_total=self.runner.compilations_after_warmup
        )


def build_engine(config: Config, emit: Callable[[EventBatch], None], progress: Progress) -> EngineParts:
    """From flags to a warm engine. Raises ConfigError, ModelError, CheckpointError or DeviceError with one sentence."""
    try:
        return build(config, emit, progress)
    except KernelChoiceError as error:
        raise ConfigError(f"--attention: {error}") from error


def build(config: Config, emit: Callable[[EventBatch], None], progress: Progress) -> EngineParts:
    """`build_engine`, but for the kernels' own error."""
    source = open_model(config.model.model)
    spec = model_spec(source.config)
    devices = devices_for(config)
    config, changes = resolve(config, device_facts(devices, spec))
    for line in changes:
        log.info("resolved %s", line)
    vocab_size = sampled_vocabulary(config, source, spec)
    buckets = Buckets.from_config(config.runtime, config.schedule)
    load = None if config.model.random_weights else source.load
    implementations = chosen_implementations(explain_rows(config, spec, devices), config.runtime.attention)
    started = start_runner(spec, config, buckets.all(), load, vocab_size, progress)
    engine = Engine(config.schedule, config.runtime, started.shape, started.runner, emit, cache=config.cache)
    facts = EngineFacts(
        max_model_len=started.shape.max_model_len,
        model_type=source.config["model_type"],
        dtype=config.model.dtype,
        platform=config.runtime.device,
        device_kind=devices[0].device_kind,
        num_devices=math.prod(config.runtime.mesh_sizes),
        max_num_seqs=config.schedule.max_num_seqs,
        max_num_batched_tokens=config.schedule.max_num_batched_tokens,
        total_pages=started.shape.lanes * started.shape.num_pages,
        page_size_tokens=started.shape.page_size_tokens,
        vocab_size=vocab_size,
        max_logprobs=started.shape.max_logprobs,
        implementations=implementations,
    )
    return EngineParts(engine, started.runner, facts, config, started.times_s)


def device_facts(devices: list[jax.Device], spec: ModelSpec) -> DeviceFacts:
    """What `resolve` needs of the device and the model."""
    platform = "cpu" if devices[0].platform == "cpu" else "cuda"
    return DeviceFacts(platform, devices[0].device_kind, len(devices), spec.max_len, spec.dtype)


def sampled_vocabulary(config: Config, source: ModelSource, spec: ModelSpec) -> int:
    """How many ids may be sampled: the tokenizer's, if there is one; rows of the head beyond it are padding."""
    folder = config.model.tokenizer or source.tokenizer_dir
    tokenizer = load_tokenizer(Path(folder)) if folder else None
    return spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)


def explain_rows(config: Config, spec: ModelSpec, devices: list[jax.Device]) -> tuple[Row, ...]:
    """The table of ops, implementations and reasons for this model on this device."""
    schedule, page = config.schedule, config.cache.page_size_tokens
    tensor, expert, data = config.runtime.mesh_sizes
    if spec.moe is None and expert > 1:  # the mesh would do, as more tensor parallelism under another name
        raise ConfigError(f"--expert-parallel-size: got {expert}, allowed: 1, the model has no experts to share out")
    placement = Placement(data, expert, tensor)
    sizes = StepSizes(
        tokens=schedule.max_num_batched_tokens,
        rows=schedule.max_num_seqs,
        chunks=schedule.max_num_chunks,
        page_tokens=page,
        max_pages=-(-(config.model.max_model_len or spec.max_len) // page),
        dtype=config.model.dtype,
    )
    shapes = op_shapes(fit_spec(spec, placement), placement, sizes)
    attention = {op: sizes for op, sizes in shapes.items() if op in ATTENTION_OPS}
    others = {op: sizes for op, sizes in shapes.items() if op not in ATTENTION_OPS}
    device = device_of(devices[0])
    return explain(attention, device, config.runtime.attention) + explain(others, device)


def chosen_implementations(rows: tuple[Row, ...], forced: str) -> dict[str, str]:
    """Op -> what runs it. Raises ConfigError, before anything is loaded, where nothing does."""
    chosen = {row.op: row.implementation for row in rows if row.chosen}
    for op in {row.op: None for row in rows if row.op not in chosen}:
        reasons = "; ".join(f"{row.implementation}: {row.reason or 'fits'}" for row in rows if row.op == op)
        raise ConfigError(f"--attention: got {forced}, allowed: auto, or what fits {op} ({reasons})")
    return chosen


def explain_model(config: Config) -> tuple[Row, ...]:
    """The table for a model that is not loaded; `jaxserve explain` prints it. Raises as `build_engine` does."""
    spec = model_spec(open_model(config.model.model).config)
    devices = devices_for(config)
    config, _ = resolve(config, device_facts(devices, spec))
    rows = explain_rows(config, spec, devices)
    chosen_implementations(rows, config.runtime.attention)
    return rows


def report_start(parts: EngineParts) -> None:
    """The start log: where the time went, and which kernels run."""
    total_s = sum(parts.times_s.values())
    for name, seconds in parts.times_s.items():
        log.info("start: %-10s %6.1f s", name, seconds)
    log.info("start: %-10s %6.1f s", "in all", total_s)
    for op, implementation in parts.facts.implementations.items():
        log.info("kernel: %-12s %s", op, implementation)
    log.info("prefix cache: %s", prefix_cache_words(parts.config))


def prefix_cache_words(config: Config) -> str:
    """What is shared, for the start log."""
    if not config.cache.prefix_cache:
        return "off"
    limits = f"; --deterministic: prompts only, {PIECE_TOKENS} tokens at a time" if config.runtime.deterministic else ""
    return f"on ({config.cache.prefix_cache_eviction}){limits}"


def main() -> int:
    """The engine's process: config, address and key come pickled on standard input from the front that started it."""
    config, address, authkey, log_level = pickle.load(sys.stdin.buffer)
    form = "%(asctime)s %(name)s %(message)s"
    logging.basicConfig(level=log_level, format=form, datefmt="%H:%M:%S", force=True)  # absl has set a handler already
    for name in ("absl", "jax"):  # orbax tells of every load, JAX of every back end that it does not find
        logging.getLogger(name).setLevel(max(log_level, logging.WARNING))
    try:
        link = EngineSide(address, authkey)
    except OSError:
        return 1  # the front has gone already, and has said why
    stop = threading.Event()
    try:
        parts = build_engine(config, link.emit, link.progress)
        report_start(parts)
        link.ready(parts.facts, parts.engine.submit, parts.stats, stop.set)
        parts.engine.run(stop)
    except JaxserveError as error:
        link.fail(error)
        return error.exit_code
    except BaseException as error:
        log.exception("the engine's process ends")
        link.fail(error)
        return 1
    finally:
        link.close()
    return 0


def end_process(code: int) -> NoReturn:
    """Leave at once: threads of XLA and TensorStore that still run would end an orderly exit with an abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
