"""From a ModelSpec and a way to load weights to a warm StepRunner: weights, pool, compiled programs, warm-up."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve import environment
from jaxserve.batch import Bucket, Program, Shape
from jaxserve.config import Config
from jaxserve.errors import DeviceError
from jaxserve.mesh import Placement, make_mesh
from jaxserve.models.decoder import SplitDecoder, split_decoder
from jaxserve.models.spec import ModelSpec
from jaxserve.runtime.compile import drop_damaged_entries, use_compile_cache
from jaxserve.runtime.lower import largest_first, lower_installs, lower_step, name_of
from jaxserve.runtime.pool import PoolRequest, pages_per_sequence, pool_pages
from jaxserve.runtime.runner import Programs, StepRunner
from jaxserve.runtime.saved import Pool, Shelf, load_or_compile, open_shelf
from jaxserve.runtime.state import State, make_state, state_bytes, state_shapes
from jaxserve.runtime.step import StepOptions
from jaxserve.runtime.weights import Load, load_weights, random_weights
from pallas_kernels.device import device_of

log = logging.getLogger("jaxserve.start")

LEAST_RESERVED = 0.97  # of the share that was asked for

Progress = Callable[[str], None]  # one line for a person who waits

CPU_POOL_SHARE = 0.25  # of the free host memory, where no size is given,
CPU_POOL_MOST_BYTES = 2 << 30  # and at most this
GPU_POOL_SHARE = 0.98  # of what the allocator was given (`environment.py`): the rest is fragmentation and code


@dataclass(frozen=True, slots=True)
class Started:
    """A warm runner and what the engine must know of it."""

    runner: StepRunner
    shape: Shape
    times_s: dict[str, float]  # where the start's time went, in order


def devices_for(config: Config) -> list[jax.Device]:
    """The devices of the configured platform. Raises DeviceError where JAX has none."""
    wanted, count = config.runtime.device, math.prod(config.runtime.mesh_sizes)
    if count > 1:
        with suppress(RuntimeError):  # JAX has looked for devices already
            jax.config.update("jax_num_cpu_devices", count)  # the host's cores as so many devices; others do not mind
    if wanted != "auto":
        jax.config.update("jax_platforms", wanted)  # the environment's value is read when JAX is imported
    try:
        devices = jax.devices() if wanted == "auto" else jax.devices("gpu" if wanted == "cuda" else wanted)
    except (RuntimeError, AssertionError) as error:  # the latter where a platform is named that has no device
        raise DeviceError(f"--device: got {wanted}, but JAX found no such device ({error})") from error
    if len(devices) < count and devices[0].platform == "cpu":
        raise DeviceError(
            f"{count} devices are asked for, but this process has started JAX with {len(devices)} CPU device(s), which "
            f"cannot change: start anew, or call jax.config.update('jax_num_cpu_devices', {count}) before the first use"
        )
    return devices


def start_runner(
    spec: ModelSpec,
    config: Config,
    buckets: Sequence[Bucket],
    load: Load | None,
    vocab_size: int,
    progress: Progress,
    cache_fill: float = 0.0,
) -> Started:
    """`config` is resolved, `buckets` are the programs that its engine will ask for. `load` None makes random weights.
    `vocab_size`: ids that may be sampled.

    Raises DeviceError where memory does not suffice, CheckpointError where the weights do not fit.
    """
    times_s: dict[str, float] = {}
    clock = time.perf_counter
    began_s = clock()

    def lap(name: str) -> None:
        nonlocal began_s
        times_s[name], began_s = times_s.get(name, 0.0) + clock() - began_s, clock()

    devices = devices_for(config)
    mesh = make_mesh(devices, *config.runtime.mesh_sizes)
    dtype = jnp.dtype(config.model.dtype)
    split = split_decoder(spec, dtype, mesh)
    spec = split.spec
    free_before_bytes = device_memory(devices[0])
    check_weights_fit(split, free_before_bytes, config)
    lap("devices")
    progress("loading weights" if load else "making random weights")
    leaves = load_weights(split, load) if load else random_weights(split, config.model.seed)
    jax.block_until_ready(leaves)
    lap("weights")
    folder = compile_cache_folder(config)
    use_compile_cache(folder)
    for _ in range(2):
        with drop_damaged_entries(folder):
            compiled = compile_fitting(
                spec, split, config, largest_first(buckets), mesh, vocab_size, free_before_bytes, progress
            )
        lap("compile")
        state = make_state(compiled.shapes, cache_fill)
        runner = StepRunner(leaves, state, compiled.shapes, compiled.programs, compiled.options, mesh, spec.vocab_size)
        lap("cache")
        progress("warming up")
        if warmed_up(runner, compiled):
            break
    lap("warm-up")
    return Started(runner, compiled.options.shape, times_s)


def warmed_up(runner: StepRunner, compiled: Compiled) -> bool:
    """Warm up. False where programs from the shelf fail, which are then deleted: they are to be compiled anew.

    A program that loads may still miss a part, which shows when it runs.
    """
    try:
        runner.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if not compiled.loaded:
            raise
        log.warning("the programs of an earlier start do not run, all are compiled anew: %s", error)
        compiled.shelf.drop(compiled.loaded)
        runner.drop_state()
        return False
    return True


def check_weights_fit(split: SplitDecoder, limit_bytes: int, config: Config) -> None:
    """Refuse before anything is allocated."""
    per_device = device_bytes(split)
    if per_device > limit_bytes:
        raise DeviceError(
            f"the weights take {per_device / 1e9:.2f} GB a device in {config.model.dtype}, "
            f"and {limit_bytes / 1e9:.2f} GB are there"
        )


def device_bytes(split: SplitDecoder) -> int:
    """Memory of the weights on each device."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in split.leaves)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The programs, and the state that they were compiled for."""

    programs: Programs
    shapes: State
    options: StepOptions
    shelf: Shelf
    loaded: set[str]  # names of those that came from the shelf


def compile_fitting(
    spec: ModelSpec,
    split: SplitDecoder,
    config: Config,
    buckets: Sequence[Bucket],
    mesh: Mesh,
    vocab_size: int,
    limit_bytes: int,
    progress: Progress,
) -> Compiled:
    """Size the pool and load or compile everything.

    The programs' shapes hold the pool's size, and the pool's size depends on the workspace of the largest program: it
    is compiled alone first with an estimate, and again only if the estimate was too low. A start whose programs are on
    the shelf takes the pool that they were made for.
    """
    device = mesh.devices.flat[0]
    dtype = jnp.dtype(config.model.dtype)
    engine_shelf = open_programs(spec, split, config, mesh, vocab_size)
    known = engine_shelf.load_pool()
    workspace_bytes = known.workspace_bytes if known else estimate_workspace_bytes(spec, config)
    for _ in range(3):
        request = pool_request(spec, config, dtype, split.placement)
        num_pages = size_pool(request, split, spec, config, mesh, limit_bytes, workspace_bytes)
        if known:
            num_pages = known.pages_for(num_pages)
        shape = make_shape(config, num_pages, vocab_size)
        options = StepOptions(shape, device_of(device), config.runtime.attention, config.runtime.deterministic)
        shapes = state_shapes(spec, shape, dtype, mesh)
        shelf = engine_shelf.about(options, placed_shapes(shapes))
        largest = {name_of(buckets[0]): lower_step(split, buckets[0], options, shapes, mesh)}
        programs, loaded = load_or_compile(shelf, largest, 1, progress)
        usage = next(iter(programs.values())).memory_analysis()
        needed_bytes = usage.temp_size_in_bytes if usage else 0
        if needed_bytes <= workspace_bytes or config.runtime.device == "cpu":
            break
        log.info("workspace: %.2f GB estimated, %.2f GB needed", workspace_bytes / 1e9, needed_bytes / 1e9)
        workspace_bytes = int(needed_bytes * 1.1)
    engine_shelf.save_pool(Pool(shape.num_pages, workspace_bytes))
    log_pool(request, shape, workspace_bytes, spec)
    rest = lower_rest(spec, split, buckets, options, shapes, mesh)
    others, also_loaded = load_or_compile(shelf, rest, max(1, min(8, os.cpu_count() or 1)), progress)
    programs |= others
    steps = {bucket: programs[name_of(bucket)] for bucket in buckets}
    plain = {bucket: programs[name] for bucket in buckets if (name := name_of(bucket, plain=True)) in programs}
    everything = Programs(steps, plain, programs["install_plain"], programs["install_wide"])
    return Compiled(everything, shapes, options, shelf, loaded | also_loaded)


def lower_rest(
    spec: ModelSpec, split: SplitDecoder, buckets: Sequence[Bucket], options: StepOptions, shapes: State, mesh: Mesh
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """All programs but the first bucket's, which is there by then. No plain forms where steps are deterministic: which
    form a step takes depends on all its requests, and two programs are not promised to round alike."""
    lowerings = {name_of(bucket): lower_step(split, bucket, options, shapes, mesh) for bucket in buckets[1:]}
    if options.device.platform != "cpu" and not options.deterministic:
        lowerings |= {
            name_of(bucket, plain=True): lower_step(split, bucket, options, shapes, mesh, plain=True)
            for bucket in buckets
            if bucket.program is not Program.SCORED
        }
    return lowerings | lower_installs(shapes, options.shape.lanes, spec.vocab_size, mesh)


def open_programs(spec: ModelSpec, split: SplitDecoder, config: Config, mesh: Mesh, vocab_size: int) -> Shelf:
    """The shelf of this engine's programs, whatever its pool's size comes to."""
    folder = compile_cache_folder(config)
    shelf = open_shelf(folder / "programs" if folder else None, list(mesh.devices.flat))
    runtime = replace(config.runtime, compile_cache_dir=None)  # the same programs wherever they lie
    sizes = (config.model.dtype, config.model.max_model_len, config.cache, config.schedule, runtime, vocab_size)
    return shelf.about(spec, sizes, placed_shapes(split.leaves))


def placed_shapes(tree: object) -> tuple[str, list[str]]:
    """A tree of ShapeDtypeStructs in words: its structure, and what each leaf is and where."""
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [f"{leaf.dtype} {leaf.shape} {leaf.sharding}" for leaf in leaves]


def make_shape(config: Config, num_pages: int, vocab_size: int) -> Shape:
    """The static sizes of the engine."""
    page = config.cache.page_size_tokens
    longest = min(config.model.max_model_len or 0, num_pages * page)
    return Shape(
        num_slots=config.schedule.max_num_seqs,
        num_pages=num_pages,
        page_size_tokens=page,
        max_pages_per_seq=-(-longest // page),
        max_chunks=min(config.schedule.max_num_chunks, config.schedule.max_num_seqs),
        vocab_size=vocab_size,
        max_logprobs=min(config.runtime.max_logprobs, vocab_size),
        max_model_len=longest,
        lanes=config.runtime.data_parallel_size,
    )


def pool_request(spec: ModelSpec, config: Config, dtype: jnp.dtype, placement: Placement) -> PoolRequest:
    """What the pool is sized from, per device."""
    attention = spec.attention
    elements = sum(
        int(np.prod(dims)) // placement.size([axis for cut in cuts for axis in cut])
        for dims in attention.cache_shapes(1, config.cache.page_size_tokens)
        for cuts in [[placement.axes(name, n) for name, n in zip(attention.cache_axes()[1:], dims[1:], strict=True)]]
    )
    return PoolRequest(
        page_bytes=spec.num_layers * elements * dtype.itemsize,
        page_size_tokens=config.cache.page_size_tokens,
        max_model_len=config.model.max_model_len or spec.max_len,
        max_num_seqs=config.schedule.max_num_seqs,
        num_pages=config.cache.num_pages,
        cache_memory_bytes=config.cache.cache_memory_bytes,
        utilization=1.0 if config.runtime.device == "cpu" else GPU_POOL_SHARE,
    )


def size_pool(
    request: PoolRequest,
    split: SplitDecoder,
    spec: ModelSpec,
    config: Config,
    mesh: Mesh,
    limit_bytes: int,
    workspace_bytes: int,
) -> int:
    """Pages for this much workspace. On the CPU what is free counts after the weights, which share the memory."""
    device = mesh.devices.flat[0]
    if config.runtime.device == "cpu":
        share_bytes = min(int(device_memory(device) * CPU_POOL_SHARE), CPU_POOL_MOST_BYTES)
        return pool_pages(request, share_bytes, 0, 0)
    probe = state_shapes(spec, make_shape(config, pages_per_sequence(request), spec.vocab_size), jnp.float32, mesh)
    used_bytes = device_bytes(split) + state_bytes(probe)
    return pool_pages(request, limit_bytes, used_bytes, workspace_bytes)


def estimate_workspace_bytes(spec: ModelSpec, config: Config) -> int:
    """A generous guess of the largest program's temporaries: logits in a few copies, and the widest activations.

    One that is too low costs a second compilation, one that is too high some pages.
    """
    tokens, rows = config.schedule.max_num_batched_tokens, config.schedule.max_num_seqs
    logits_bytes = 4 * spec.vocab_size * 4 * max(rows, 256)
    widest = max(2 * spec.mlp_width, 4 * spec.attention.num_heads * spec.attention.head_dim)
    if spec.moe is not None:
        widest = max(widest, spec.moe.rule.top_k * (spec.hidden_size + spec.moe.width))
    return logits_bytes + tokens * widest * 2 * 6 + (256 << 20)


def device_memory(device: jax.Device) -> int:
    """Bytes that may be used: the allocator's share on a GPU, the host's free memory on the CPU.

    Raises DeviceError where another process holds part of the share: then the allocator could not reserve it, and would
    run out later.
    """
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jax.device_put(np.zeros(1), device).block_until_ready()  # the first allocation reserves the share
    return reserved_bytes(device.memory_stats() or {}, environment.reserves_memory())


def reserved_bytes(stats: dict[str, int], reserves: bool) -> int:
    """The allocator's limit, if it got it (see `device_memory`)."""
    limit_bytes = stats["bytes_limit"]
    got_bytes = stats.get("pool_bytes", limit_bytes) if reserves else limit_bytes
    if got_bytes < LEAST_RESERVED * limit_bytes:
        raise DeviceError(
            f"--gpu-memory-utilization asks for {limit_bytes / 1e9:.1f} GB of the GPU's memory and only "
            f"{got_bytes / 1e9:.1f} GB could be reserved: another process holds the rest; "
            "lower the share, or end the other process"
        )
    return limit_bytes


def compile_cache_folder(config: Config) -> Path | None:
    """The configured folder; "" turns the cache off."""
    return Path(config.runtime.compile_cache_dir) if config.runtime.compile_cache_dir else None


def log_pool(request: PoolRequest, shape: Shape, workspace_bytes: int, spec: ModelSpec) -> None:
    """The sum that the pool's size came from."""
    log.info(
        "cache: %d pages of %d tokens = %.2f GB (%d tokens, %.1f requests of max_model_len %d); workspace %.2f GB",
        shape.num_pages,
        shape.page_size_tokens,
        shape.num_pages * request.page_bytes / 1e9,
        shape.num_pages * shape.page_size_tokens,
        shape.num_pages / pages_per_sequence(replace(request, max_model_len=shape.max_model_len)),
        shape.max_model_len,
        workspace_bytes / 1e9,
    )
