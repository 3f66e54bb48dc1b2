"""Compiling the step programs: the on-disk cache, compiling in threads, and counting what compiles when.

jax facts that shape this file: lowering is Python, which threads do not speed up, so they only compile; processes may
help to lower (`apart.py`). A kernel's serialised bytes hold a process-wide counter, which would change cache keys from
run to run: `use_compile_cache` takes it out. A process killed while it writes a cache entry leaves a truncated file
that JAX never replaces; `drop_damaged_entries` turns its warning into a deletion.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
from jax import monitoring

from pallas_kernels.kernel_names import leave_out_counts

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

log = logging.getLogger("jaxserve.compile")


class CompileCounter:
    """Counts compilations (cache hits among them) from its creation on, in all threads."""

    def __init__(self) -> None:
        self.compilations = 0
        self.cache_hits = 0
        monitoring.register_event_duration_secs_listener(self._duration)
        monitoring.register_event_listener(self._event)

    def _duration(self, event: str, seconds: float, **_: object) -> None:
        self.compilations += event == COMPILE_EVENT

    def _event(self, event: str, **_: object) -> None:
        self.cache_hits += event == CACHE_HIT_EVENT

    def close(self) -> None:
        """Stop listening."""
        monitoring.unregister_event_duration_listener(self._duration)
        monitoring.unregister_event_listener(self._event)


def use_compile_cache(folder: Path | None) -> None:
    """Keep compiled programs in `folder`; None turns the cache off. Kernels are named so that their keys last.

    A folder that cannot be made costs the next start its time, not this one its life.
    """
    leave_out_counts()
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("--compile-cache-dir: got %s, which cannot be made (%s): programs are not kept", folder, error)
            folder = None
    jax.config.update("jax_compilation_cache_dir", str(folder) if folder else None)
    if folder:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # the checkout's place is no key


@contextmanager
def drop_damaged_entries(folder: Path | None) -> Iterator[None]:
    """Delete cache entries that JAX warns it cannot read: it would warn and recompile at every later start."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        damaged = re.search(r"Error reading persistent compilation cache entry for '([^']+)'", str(warning.message))
        if damaged and folder:
            for entry in folder.glob(f"{damaged.group(1)}-*"):
                log.warning("deleted the damaged compile cache entry %s", entry.name)
                entry.unlink(missing_ok=True)
        elif not damaged:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def compile_all[Key](
    lowerings: dict[Key, Callable[[], jax.stages.Lowered]],
    threads: int,
    done: Callable[[Key, int, int], None],
    keep: Callable[[Key, jax.stages.Compiled, bool], None] = lambda key, program, fresh: None,
) -> dict[Key, jax.stages.Compiled]:
    """Lower in order, compile in threads; `done(key, finished, total)` is called as each one is ready.

    `keep(key, program, fresh)` is called in the thread that compiled it; `fresh`: from no cache. The first error of any
    program is raised, as soon as the program that is being lowered is; those that no thread compiles yet are dropped.
    """
    compiled: dict[Key, jax.stages.Compiled] = {}
    events: dict[int, set[str]] = {}  # of each thread's last program; JAX tells them in the thread itself

    def note(event: str, *_: object, **__: object) -> None:
        events.setdefault(threading.get_ident(), set()).update({event} & {COMPILE_EVENT, CACHE_HIT_EVENT})

    def finish(key: Key, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        events[threading.get_ident()] = set()
        program = lowered.compile()
        keep(key, program, events[threading.get_ident()] == {COMPILE_EVENT})
        return program

    monitoring.register_event_listener(note)
    monitoring.register_event_duration_secs_listener(note)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool, dropped_after_error(pool):
            futures: dict[Key, Future[jax.stages.Compiled]] = {}
            for key, lower in lowerings.items():
                futures[key] = pool.submit(finish, key, lower())
                for future in futures.values():
                    if future.done():
                        future.result()  # raises its error
            for key, future in futures.items():
                compiled[key] = future.result()
                done(key, len(compiled), len(futures))
    finally:
        monitoring.unregister_event_listener(note)
        monitoring.unregister_event_duration_listener(note)
    return compiled


@contextmanager
def dropped_after_error(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Drop what no thread has begun when the block fails: leaving the pool waits for the rest only."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
