"""From a ModelSpec and a way to load weights to a warm StepRunner: weights, pool, compiled programs, warm-up."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve import environment
from jaxserve.batch import Bucket, Shape
from jaxserve.config import Config
from jaxserve.errors import DeviceError
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import SplitDecoder, split_decoder
from jaxserve.models.spec import ModelSpec
from jaxserve.runtime.apart import Job, lower_apart, settings_now, worker_count
from jaxserve.runtime.compile import drop_damaged_entries, use_compile_cache
from jaxserve.runtime.lower import largest_first, lower_installs, lower_steps, name_of
from jaxserve.runtime.pool import PoolRequest, estimate_workspace_bytes, pages_per_sequence, pool_pages
from jaxserve.runtime.runner import Programs, StepRunner
from jaxserve.runtime.saved import Pool, Shelf, load_or_compile, open_shelf
from jaxserve.runtime.state import State, make_state, state_bytes, state_shapes
from jaxserve.runtime.step import StepOptions
from jaxserve.runtime.weights import Load, load_weights, random_weights
from pallas_kernels.device import device_of

log = logging.getLogger("jaxserve.start")

MOST_THREADS = 8  # that compile: XLA tries products out on the GPU meanwhile, with operands for each thread
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
    split = split_decoder(spec, jnp.dtype(config.model.dtype), mesh)
    limit_bytes = device_memory(devices[0])
    check_weights_fit(split, limit_bytes, config)
    order = Order(split.spec, split, config, largest_first(buckets), mesh, vocab_size, limit_bytes)
    folder = compile_cache_folder(config)
    use_compile_cache(folder)
    lap("devices")
    with ExitStack() as workers:  # they lower while the weights are loaded
        plan = make_plan(order, workers)
        progress("loading weights" if load else "making random weights")
        leaves = load_weights(split, load) if load else random_weights(split, config.model.seed)
        jax.block_until_ready(leaves)
        lap("weights")
        for _ in range(2):
            with drop_damaged_entries(folder):
                plan, programs, loaded = compile_plan(order, plan, workers, progress)
            lap("compile")
            state = make_state(plan.shapes, cache_fill)
            runner = StepRunner(leaves, state, plan.shapes, programs, plan.options, mesh, order.spec.vocab_size)
            lap("cache")
            progress("warming up")
            if warmed_up(runner, plan.shelf, loaded):
                break
            plan = make_plan(order, workers)
    lap("warm-up")
    return Started(runner, plan.options.shape, times_s)


def warmed_up(runner: StepRunner, shelf: Shelf, loaded: set[str]) -> bool:
    """Warm up. False where programs `loaded` from the shelf fail, which are then deleted: they are to be compiled anew.

    A program that loads may still miss a part, which shows when it runs.
    """
    try:
        runner.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if not loaded:
            raise
        log.warning("the programs of an earlier start do not run, all are compiled anew: %s", error)
        shelf.drop(loaded)
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
class Order:
    """What is to be compiled, but for the pool's size."""

    spec: ModelSpec  # as it runs on the mesh
    split: SplitDecoder
    config: Config
    buckets: Sequence[Bucket]  # the largest first
    mesh: Mesh
    vocab_size: int
    limit_bytes: int  # that a device has for weights and all else, see `device_memory`


@dataclass(frozen=True, slots=True)
class Plan:
    """The pool beside so much workspace, and the programs for it, which hold its size in every shape."""

    workspace_bytes: int
    shapes: State
    options: StepOptions
    shelf: Shelf
    lowerings: dict[str, Callable[[], jax.stages.Lowered]]


class WorkspaceError(Exception):
    """A program needs more workspace than the pool leaves."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(f"{needed_bytes / 1e9:.2f} GB are needed")
        self.needed_bytes = needed_bytes


def make_plan(order: Order, workers: ExitStack, workspace_bytes: int | None = None) -> Plan:
    """Size the pool. `workers` is left with the processes that lower what is not on the shelf, in place of others.

    `workspace_bytes` None: the pool of an earlier start, or an estimate, which is the same at every start.
    """
    workers.close()
    config, device = order.config, device_of(order.mesh.devices.flat[0])
    engine_shelf = open_programs(order)
    known = engine_shelf.load_pool() if workspace_bytes is None else None
    if workspace_bytes is None:
        estimate_bytes = estimate_workspace_bytes(order.spec, config, order.split.placement)
        workspace_bytes = known.workspace_bytes if known else estimate_bytes
    num_pages = size_pool(order, workspace_bytes)
    if known:
        num_pages = known.pages_for(num_pages)
    options = StepOptions(
        make_shape(config, num_pages, order.vocab_size), device, config.runtime.attention, config.runtime.deterministic
    )
    shapes = state_shapes(order.spec, options.shape, jnp.dtype(config.model.dtype), order.mesh)
    shelf = engine_shelf.about(options, placed_shapes(shapes))
    engine_shelf.save_pool(Pool(num_pages, workspace_bytes))
    return Plan(workspace_bytes, shapes, options, shelf, lower_all(order, options, shapes, shelf, workers))


def compile_plan(order: Order, plan: Plan, workers: ExitStack, progress: Progress) -> tuple[Plan, Programs, set[str]]:
    """Load or compile everything, all at once; also the names of the programs loaded.

    A program that needs more workspace than the plan has ends that: a plan with more takes its place. Raises
    DeviceError where no page is left then.
    """
    threads = min(MOST_THREADS, environment.usable_cores())
    while True:
        check = partial(check_workspace, order, plan)
        try:
            programs, loaded = load_or_compile(plan.shelf, plan.lowerings, threads, progress, check)
        except WorkspaceError as error:
            progress("compiling again with a smaller cache, since steps need more memory than was estimated")
            log.info("workspace: %.2f GB estimated, %s", plan.workspace_bytes / 1e9, error)
            plan = make_plan(order, workers, int(error.needed_bytes * 1.1))
            continue
        break
    log_pool(order, plan)
    steps = {bucket: programs[name_of(bucket)] for bucket in order.buckets}
    plain = {bucket: programs[name] for bucket in order.buckets if (name := name_of(bucket, True)) in programs}
    installs = [programs[name] for name in ("install_plain", "install_wide", "install_table")]
    return plan, Programs(steps, plain, *installs), loaded


def check_workspace(order: Order, plan: Plan, program: jax.stages.Compiled) -> None:
    """Raises WorkspaceError if the pool would be smaller, had the program's workspace been known. Not on the CPU."""
    usage = program.memory_analysis()
    needed_bytes = usage.temp_size_in_bytes if usage else 0
    if order.config.runtime.device == "cpu" or needed_bytes <= plan.workspace_bytes:
        return
    if size_pool(order, needed_bytes) < plan.options.shape.num_pages:
        raise WorkspaceError(needed_bytes)


def lower_all(
    order: Order, options: StepOptions, shapes: State, shelf: Shelf, workers: ExitStack
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """All programs by name, the first bucket's first. `workers` is left with the processes that lower the missing."""
    config = order.config
    steps = lower_steps(order.split, order.buckets, options, shapes, order.mesh)
    missing = tuple(name for name in steps if not shelf.holds(name))
    count = worker_count(config.runtime.lower_processes, options.device, environment.usable_cores(), len(missing))
    sizes, devices, buckets = config.runtime.mesh_sizes, jax.device_count(), tuple(order.buckets)
    job = Job(order.spec, config.model.dtype, sizes, devices, buckets, options, settings_now(), missing)
    apart = workers.enter_context(lower_apart({name: steps[name] for name in missing}, job, count))
    return steps | apart | lower_installs(shapes, options.shape.lanes, order.spec.vocab_size, order.mesh)


def open_programs(order: Order) -> Shelf:
    """The shelf of this engine's programs, whatever its pool's size comes to."""
    config, folder = order.config, compile_cache_folder(order.config)
    shelf = open_shelf(folder / "programs" if folder else None, list(order.mesh.devices.flat))
    runtime = replace(config.runtime, compile_cache_dir=None, lower_processes=None)  # the same programs
    cache = replace(config.cache, prefix_cache=True, prefix_cache_eviction="lru")  # no matter of the programs
    sizes = (config.model.dtype, config.model.max_model_len, cache, config.schedule, runtime, order.vocab_size)
    return shelf.about(order.spec, sizes, placed_shapes(order.split.leaves))


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


def pool_request(order: Order) -> PoolRequest:
    """What the pool is sized from, per device."""
    spec, config, placement, attention = order.spec, order.config, order.split.placement, order.spec.attention
    elements = sum(
        int(np.prod(dims)) // placement.size([axis for cut in cuts for axis in cut])
        for dims in attention.cache_shapes(1, config.cache.page_size_tokens)
        for cuts in [[placement.axes(name, n) for name, n in zip(attention.cache_axes()[1:], dims[1:], strict=True)]]
    )
    return PoolRequest(
        page_bytes=spec.num_layers * elements * jnp.dtype(config.model.dtype).itemsize,
        page_size_tokens=config.cache.page_size_tokens,
        max_model_len=config.model.max_model_len or spec.max_len,
        max_num_seqs=config.schedule.max_num_seqs,
        num_pages=config.cache.num_pages,
        cache_memory_bytes=config.cache.cache_memory_bytes,
        utilization=1.0 if config.runtime.device == "cpu" else GPU_POOL_SHARE,
    )


def size_pool(order: Order, workspace_bytes: int) -> int:
    """Pages for this much workspace. On the CPU what is free counts less the weights, which share the memory."""
    spec, config, split, mesh = order.spec, order.config, order.split, order.mesh
    request = pool_request(order)
    if config.runtime.device == "cpu":
        free_bytes = max(0, order.limit_bytes - device_bytes(split) * mesh.size)
        return pool_pages(request, min(int(free_bytes * CPU_POOL_SHARE), CPU_POOL_MOST_BYTES), 0, 0)
    probe = state_shapes(spec, make_shape(config, pages_per_sequence(request), spec.vocab_size), jnp.float32, mesh)
    used_bytes = device_bytes(split) + state_bytes(probe)
    return pool_pages(request, order.limit_bytes, used_bytes, workspace_bytes)


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


def log_pool(order: Order, plan: Plan) -> None:
    """The sum that the pool's size came from."""
    request, shape = pool_request(order), plan.options.shape
    log.info(
        "cache: %d pages of %d tokens = %.2f GB (%d tokens, %.1f requests of max_model_len %d); workspace %.2f GB",
        shape.num_pages,
        shape.page_size_tokens,
        shape.num_pages * request.page_bytes / 1e9,
        shape.num_pages * shape.page_size_tokens,
        shape.num_pages / pages_per_sequence(replace(request, max_model_len=shape.max_model_len)),
        shape.max_model_len,
        plan.workspace_bytes / 1e9,
    )
