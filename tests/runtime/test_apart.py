"""Lowering in other processes: the same programs and results as here, and a start that gets by without the workers."""

from __future__ import annotations

import logging
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from jaxserve import environment
from jaxserve.batch import Bucket, Program, Shape
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime import apart
from jaxserve.runtime.apart import Awaited, Job, lower_apart, names_of_worker, settings_now, start_process, worker_count
from jaxserve.runtime.lower import Lowering, lower_steps
from jaxserve.runtime.state import state_shapes
from jaxserve.runtime.step import StepOptions
from pallas_kernels.device import Device
from tests.fakes.tiny import CONFIG, TinyServer

BUCKETS = (Bucket(Program.MIXED, 64), Bucket(Program.DECODE, 4))
H200 = Device("gpu", "9.0", 132)
CPU = Device("cpu")


def programs(sizes: tuple[int, int, int], device: Device = CPU) -> tuple[dict[str, Lowering], Job]:
    """The steps of the tiny model, cut to one layer, for a mesh (tensor, expert, data), and the job to lower them."""
    mesh: Mesh = make_mesh(jax.devices(), *sizes)
    config = CONFIG | {"num_key_value_heads": 4, "num_hidden_layers": 1}
    split = split_decoder(model_spec(config), jnp.dtype("float32"), mesh)
    shape = Shape(4, 16, 16, 4, 4, 120, 5, 64, lanes=sizes[2])
    options = StepOptions(shape, device, "auto")
    shapes = state_shapes(split.spec, shape, jnp.dtype("float32"), mesh)
    steps = lower_steps(split, BUCKETS, options, shapes, mesh)
    devices = jax.device_count()
    return steps, Job(split.spec, "float32", sizes, devices, BUCKETS, options, settings_now(), tuple(steps))


@pytest.fixture(scope="module")
def tiny_programs() -> tuple[dict[str, Lowering], Job]:
    """Those of one device."""
    return programs((1, 1, 1))


def compiled_facts(lowered: jax.stages.Lowered) -> tuple[object, ...]:
    """What is updated in place, where everything lies, the collectives and the temporaries of a compiled program."""
    program = lowered.compile({"xla_backend_optimization_level": 0})  # machine code that nobody runs
    text = program.as_text() or ""
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text.splitlines()[0])
    assert aliases is not None
    collectives = sorted(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)\(", text))
    places = jax.tree.map(str, (program.input_shardings, program.output_shardings))
    return aliases.group(1), places, collectives, program.memory_analysis().temp_size_in_bytes, program.out_tree


def test_a_worker_lowers_the_same_program() -> None:
    """On several devices, where placements and collectives could differ."""
    steps, job = programs((2, 1, 2))
    with lower_apart(steps, replace(job, names=("decode 4",)), 1) as awaited:
        wait = awaited["decode 4"]
        assert isinstance(wait, Awaited) and wait.answer.result(timeout=100)
        assert compiled_facts(wait()) == compiled_facts(steps["decode 4"]())


def test_an_engine_serves_the_same(tiny: TinyServer, caplog: pytest.LogCaptureFixture) -> None:
    def serve(server: TinyServer) -> list[object]:
        requests = [server.request([5, 6, 7], 8, logprobs=3), server.request(range(3, 90), 8, temperature=0.7, seed=3)]
        results = server.run(requests)
        return [(result.token_ids, [float(row.chosen[0]) for row in result.logprobs]) for result in results]

    with caplog.at_level(logging.DEBUG, "jaxserve.apart"):
        server = TinyServer(lower_processes=2)
    assert len([record for record in caplog.records if record.message.startswith("lowered ")]) == 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    served = serve(server)
    assert server.runner.compilations_after_warmup == 0
    assert served == serve(tiny)
    server.runner.close()


def test_a_gpu_program_is_lowered_for_the_gpu_without_one() -> None:
    """Its module names the platform; that a GPU takes it, only a GPU can show."""
    steps, job = programs((1, 1, 1), H200)
    assert [name for name in steps if name.endswith("plain")] == ["mixed 64 plain", "decode 4 plain"]
    split = split_decoder(job.spec, jnp.dtype("float32"), make_mesh(jax.devices()))
    shapes = steps["decode 4"].arguments[1]
    deterministic = replace(job.options, deterministic=True)
    assert list(lower_steps(split, BUCKETS, deterministic, shapes, make_mesh(jax.devices()))) == [
        "mixed 64",
        "decode 4",
    ]
    with lower_apart(steps, replace(job, names=("decode 4 plain",)), 1) as awaited:
        wait = awaited["decode 4 plain"]
        assert isinstance(wait, Awaited)
        assert wait.answer.result(timeout=100)["platforms"] == ("cuda",)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("jaxserve.runtime.no_such_module", "No module named jaxserve.runtime.no_such_module"),
        ("jaxserve.errors", "EOFError"),  # ends without a word
    ],
)
def test_workers_that_fail_are_done_without_and_told_once(
    tiny_programs: tuple[dict[str, Lowering], Job],
    worker: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(apart, "WORKER", worker)
    steps, job = tiny_programs
    with caplog.at_level(logging.DEBUG, "jaxserve.apart"), lower_apart(steps, job, 2) as awaited:
        lowered = {name: wait().as_text() for name, wait in awaited.items()}
    assert lowered == {name: lower().as_text() for name, lower in steps.items()}
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]
    assert all(reason in record.message for record in caplog.records)


def test_processes_that_cannot_be_started_are_done_without(
    tiny_programs: tuple[dict[str, Lowering], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    steps, job = tiny_programs
    with lower_apart(steps, job, 2) as awaited:
        awaited["decode 4"]()
    assert "FileNotFoundError" in caplog.text


def test_a_worker_that_is_too_slow_is_given_up(
    tiny_programs: tuple[dict[str, Lowering], Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apart, "ANSWER_LIMIT_S", 0.2)
    steps, job = tiny_programs
    with lower_apart(steps, job, 1) as awaited:
        awaited["decode 4"]()
    assert "the worker failed (EOFError" in caplog.text


def test_a_worker_that_does_not_take_its_job_is_given_up(
    tiny_programs: tuple[dict[str, Lowering], Job],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A job longer than the pipe holds, and a process that reads nothing."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(apart, "ANSWER_LIMIT_S", 0.2)
    steps, job = tiny_programs
    with lower_apart(steps, replace(job, settings=job.settings | {"long": "x" * (1 << 20)}), 1) as awaited:
        awaited["decode 4"]()
    assert "the worker failed (BrokenPipeError" in caplog.text


def test_a_program_that_cannot_be_exported_is_lowered_here(
    tiny_programs: tuple[dict[str, Lowering], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """The others of the worker are not lost: each has its own answer."""
    steps, job = tiny_programs
    broken = replace(job, options=replace(job.options, attention="nothing"))
    with caplog.at_level(logging.DEBUG, "jaxserve.apart"), lower_apart(steps, broken, 1) as awaited:
        lowered = [wait() for wait in awaited.values()]
        failed = [record.message for record in caplog.records if not record.message.startswith("lowered ")]
    assert len(lowered) == len(failed) == 2
    assert all("nothing" in message for message in failed)


def ended(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within some seconds."""
    deadline_s = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return condition()


def test_workers_end_with_the_block(tiny_programs: tuple[dict[str, Lowering], Job]) -> None:
    """Also when they have not begun, and when Ctrl-C ends it."""
    steps, job = tiny_programs
    before = children()
    with pytest.raises(KeyboardInterrupt), lower_apart(steps, job, 2):
        pids = children() - before
        raise KeyboardInterrupt
    assert len(pids) == 2 and not any(running(pid) for pid in pids)


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids.update(map(int, task.read_text().split()))
    return pids


def test_a_worker_ends_when_nobody_waits_for_it(tiny_programs: tuple[dict[str, Lowering], Job], tmp_path: Path) -> None:
    """In the middle of its job."""
    with (tmp_path / "errors").open("w+b") as errors:
        process = start_process(1, errors)
        assert process.stdin and process.stdout
        names = ("decode 4",) * 1000
        pickle.dump(replace(tiny_programs[1], names=names), process.stdin)
        process.stdin.flush()
        pickle.load(process.stdout)
        process.stdin.close()
        assert ended(lambda: process.poll() is not None)
        process.stdout.close()


def test_a_killed_parent_leaves_no_worker(tmp_path: Path) -> None:
    """A script without a main guard, which is run once; its worker waits for a job that never comes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom jaxserve.runtime.apart import start_process\n"
        "print('run', start_process(1, sys.stderr.buffer).pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    variables = environment.worker_variables(1, [str(Path(apart.__file__).parents[2])])
    with (tmp_path / "out").open("w+b") as out:
        subprocess.run([sys.executable, str(script)], env=variables, stdout=out, stderr=subprocess.DEVNULL)
    word, pid = (tmp_path / "out").read_text().split()
    assert word == "run"
    assert ended(lambda: not running(int(pid)))


def running(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_counts() -> None:
    assert [worker_count(None, H200, cores, 18) for cores in (2, 4, 16, 64)] == [0, 2, 14, 18]
    assert worker_count(None, CPU, 64, 18) == worker_count(None, Device("gpu", "8.0"), 64, 18) == 0
    assert [worker_count(None, H200, 64, programs) for programs in (0, 1, 2)] == [0, 0, 2]
    assert (worker_count(3, CPU, 1, 18), worker_count(0, H200, 64, 18)) == (3, 0)
    names = tuple("abcdefg")
    assert [names_of_worker(names, worker, 3) for worker in range(3)] == [("a", "f", "g"), ("b", "e"), ("c", "d")]


def test_a_workers_environment_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    variables = environment.worker_variables(2, ["a", "b"])
    assert (variables["XLA_FLAGS"], variables["JAX_NUM_CPU_DEVICES"]) == ("--xla_a=1", "2")
    assert (variables["JAX_PLATFORMS"], variables["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert variables["PYTHONPATH"] == f"a{os.pathsep}b"
