"""Lowering in other processes: a cold start on a GPU is mostly lowering, Python that threads do not speed up.

A worker (`lower_worker.py`) gets picklable facts, makes the model's shapes anew on as many CPU devices, and sends back
each program as `jax.export` gives it: StableHLO and the trees around it. This process calls that in a jitted function
of its own, which takes milliseconds to lower and has the same donations and placements.

Workers are started by command and not by `multiprocessing`, which would run a user's script again. What a worker does
not bring is lowered here. A worker ends when its standard input does, so also when this process is killed; one that
does not answer in time is killed.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any

import jax
from jax import export

import jaxserve
from jaxserve import environment
from jaxserve.batch import Bucket
from jaxserve.models.spec import ModelSpec
from jaxserve.runtime.lower import Lowering
from jaxserve.runtime.saved import NO_FACT
from jaxserve.runtime.step import StepOptions
from pallas_kernels.device import Device

log = logging.getLogger("jaxserve.apart")

WORKER = "jaxserve.runtime.lower_worker"
LEAST_CORES = 4  # with fewer the workers' imports cost what they gain
SPARE_CORES = 2  # for this process, which compiles meanwhile
ANSWER_LIMIT_S = 240.0  # a worker that takes longer to start, or for one program, is given up

# Settings that a worker has values of its own for.
OWN_SETTINGS = ("jax_num_cpu_devices", "jax_export_ignore_forward_compatibility")


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What a worker must know. `spec` is the model as it runs on the mesh (`SplitDecoder.spec`)."""

    spec: ModelSpec
    dtype: str
    mesh_sizes: tuple[int, int, int]  # tensor, expert, data
    num_devices: int  # that JAX has here, of which the mesh takes the first
    buckets: tuple[Bucket, ...]
    options: StepOptions
    settings: dict[str, Any]  # of JAX, see `settings_now`
    names: tuple[str, ...]  # the programs to lower, in this order


def settings_now() -> dict[str, Any]:
    """JAX's settings in this process, as far as they change what is lowered."""
    return {
        name: value
        for name, value in jax.config.values.items()
        if not NO_FACT.search(name) and name not in OWN_SETTINGS and isinstance(value, bool | int | float | str | None)
    }


def worker_count(wanted: int | None, device: Device, cores: int, programs: int) -> int:
    """Processes to lower so many programs in; 0: lower them here.

    `wanted` None: one for each core but a few. Only for the GPUs that the native kernels are written for: without a
    GPU JAX lowers a kernel for those, and on a CPU nothing takes long.
    """
    if wanted is None:
        wanted = cores - SPARE_CORES if device.is_sm90 and cores >= LEAST_CORES and programs > 1 else 0
    return min(wanted, programs)


def names_of_worker(names: tuple[str, ...], worker: int, count: int) -> tuple[str, ...]:
    """The programs of one of `count` workers: dealt out to and fro, since names come with the longest first."""
    turn = (*range(count), *reversed(range(count)))
    return tuple(name for index, name in enumerate(names) if turn[index % len(turn)] == worker)


@contextmanager
def lower_apart(
    lowerings: dict[str, Lowering], job: Job, count: int
) -> Iterator[dict[str, Callable[[], jax.stages.Lowered]]]:
    """The same programs, which `count` processes lower from now on: calling one waits for it. 0: unchanged.

    A program that no worker brings is lowered here when it is called, with one warning for all such programs. The
    processes end with the block.
    """
    if not count:
        yield dict(lowerings)
        return
    answers: dict[str, Future[dict[str, Any]]] = {name: Future() for name in lowerings}
    levels = chain((logging.WARNING,), repeat(logging.DEBUG))
    workers = []
    try:
        for index in range(count):
            own = dataclasses.replace(job, names=names_of_worker(job.names, index, count))
            workers.append(Worker(own, {name: answers[name] for name in own.names}))
        yield {name: Awaited(name, lowering, answers[name], levels) for name, lowering in lowerings.items()}
    finally:
        for worker in workers:
            worker.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Awaited:
    """A program that a worker lowers."""

    name: str
    lowering: Lowering
    answer: Future[dict[str, Any]]
    levels: Iterator[int]  # what to log failures at, the same for all programs: the first one warns

    def __call__(self) -> jax.stages.Lowered:
        """Wait for the worker's module and lower a call of it; lower the program itself where that fails."""
        try:
            exported = export.Exported(**self.answer.result())
            return self.lowering.lower_as(named_call(exported))
        except Exception as error:  # the worker's, or what JAX raises at a module that it does not take
            log.log(
                next(self.levels),
                "lowering in worker processes failed, so this process lowers what is missing, which takes longer: "
                "%s: %s",
                self.name,
                error,
            )
            return self.lowering()


def named_call(exported: export.Exported) -> Callable:
    """The exported function under its own name, which profiles and cache entries show."""

    def call(*arguments: Any) -> Any:
        return exported.call(*arguments)

    call.__name__ = exported.fun_name
    return call


class Worker:
    """One process and the thread that listens to it. Every answer is set in the end: a module, or an error."""

    def __init__(self, job: Job, answers: dict[str, Future[dict[str, Any]]]) -> None:
        self.job, self.answers = job, answers
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # its standard error: shown in part where it fails
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = start_process(job.num_devices, self.errors)
        except OSError as error:
            self._give_up(error)
        self.thread = threading.Thread(target=self._listen, name="lower", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        """Send the job, take the answers, which come in the order of its names."""
        if self.process is None:
            return
        assert self.process.stdin and self.process.stdout
        try:
            with time_limit(self.process):
                pickle.dump(self.job, self.process.stdin)
                self.process.stdin.flush()  # not closed: its end tells the worker that this process is gone
            for name in self.job.names:
                with time_limit(self.process):
                    sent, answer = pickle.load(self.process.stdout)
                if isinstance(answer, str):
                    self.answers[sent].set_exception(RuntimeError(answer))
                else:
                    self.answers[sent].set_result(answer)
                log.debug("lowered %s in process %d", name, self.process.pid)
        except Exception as error:  # it ended early, or sent what is no answer
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        reason = f"the worker failed ({type(error).__name__}: {error}) {self._last_words()}".rstrip()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(RuntimeError(reason))

    def _last_words(self) -> str:
        """The last line that it wrote to standard error."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the process, whatever it does, and the thread."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.thread.join()
        if self.process is not None:
            for pipe in (self.process.stdin, self.process.stdout):
                with suppress(OSError):  # what the process did not read any more
                    pipe.close() if pipe else None
        self.errors.close()


def start_process(num_devices: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """A worker that waits for its job. Raises OSError where the system starts none."""
    folders = [str(Path(jaxserve.__file__).parents[1]), *(path or os.getcwd() for path in sys.path)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment.worker_variables(num_devices, folders),
        start_new_session=True,  # Ctrl-C is for this process, which then ends its workers
    )


@contextmanager
def time_limit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process if the block takes too long: who reads from it then sees its end."""
    timer = threading.Timer(ANSWER_LIMIT_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
