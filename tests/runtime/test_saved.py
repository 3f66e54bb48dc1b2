"""Finished programs on disk: a second start compiles none of them, serves the same, and survives what it cannot use."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import environment
from jaxserve.runtime import saved
from jaxserve.runtime.compile import compile_all, use_compile_cache
from jaxserve.runtime.runner import StepRunner
from jaxserve.runtime.saved import Pool, Shelf, common_facts, drop_oldest, load_or_compile, open_shelf, write_whole
from tests.fakes.tiny import TinyServer

NAMES = ["mixed 64", "scored 64", "decode 4", "decode 2", "install_plain", "install_wide", "install_table"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own; XLA's is set back afterwards."""
    compilation_cache.reset_cache()
    jax.clear_caches()  # a program that an earlier test left in memory would not be kept
    yield tmp_path / "cache"
    use_compile_cache(None)
    compilation_cache.reset_cache()


def serve(server: TinyServer) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of a short and a long prompt; every step must update the state in place."""
    before = jax.tree.leaves(server.runner.state.caches)
    shards = [shard.data.unsafe_buffer_pointer() for leaf in before for shard in leaf.addressable_shards]
    requests = [server.request([5, 6, 7], 8, logprobs=3), server.request(range(3, 90), 8, temperature=0.7, seed=3)]
    results = server.run(requests)
    assert all(leaf.is_deleted() for leaf in before)
    after = jax.tree.leaves(server.runner.state.caches)
    assert [shard.data.unsafe_buffer_pointer() for leaf in after for shard in leaf.addressable_shards] == shards
    return [(result.token_ids, [float(row.chosen[0]) for row in result.logprobs]) for result in results]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the programs that are lowered from now on."""
    names: list[str] = []

    def watched(lowerings, *args):
        names.extend(lowerings)
        return compile_all(lowerings, *args)

    monkeypatch.setattr(saved, "compile_all", watched)
    return names


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_a_second_start_lowers_nothing_and_serves_the_same(
    folder: Path, mesh: tuple[int, int, int], lowered: list[str]
) -> None:
    wanted = serve(TinyServer(mesh=mesh, compile_cache=folder, num_key_value_heads=4))
    assert lowered == NAMES
    server = TinyServer(mesh=mesh, compile_cache=folder, num_key_value_heads=4)
    assert lowered == NAMES
    assert serve(server) == wanted
    assert server.runner.compilations_after_warmup == 0


def test_only_what_is_damaged_or_of_other_facts_is_compiled(
    folder: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = serve(TinyServer(compile_cache=folder))
    (cut,), (turned,) = (list(folder.glob(f"programs/{name}-*")) for name in ("decode_4", "install_wide"))
    cut.write_bytes(cut.read_bytes()[:1000])
    data = bytearray(turned.read_bytes())
    data[-100] ^= 1
    turned.write_bytes(data)
    lowered.clear()
    with caplog.at_level(logging.WARNING):
        assert serve(TinyServer(compile_cache=folder)) == wanted
    assert lowered == ["decode 4", "install_wide"]
    assert [record.message.endswith("ValueError: it is damaged") for record in caplog.records] == [True, True]
    lowered.clear()
    monkeypatch.setenv("XLA_FLAGS", environment.compiler_settings()[0][1] + " --xla_cpu_enable_fast_min_max=true")
    TinyServer(compile_cache=folder)
    assert lowered == NAMES


def test_programs_that_load_and_do_not_run_are_compiled_anew(
    folder: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = serve(TinyServer(compile_cache=folder))
    warm_up, failures = StepRunner.warm_up, ["NOT_FOUND: a kernel"]

    def failing(runner: StepRunner) -> float:
        warm_up(runner)
        if failures:
            raise jax.errors.JaxRuntimeError(failures.pop())
        return 0.0

    monkeypatch.setattr(StepRunner, "warm_up", failing)
    lowered.clear()
    server = TinyServer(compile_cache=folder)
    assert lowered == NAMES
    assert "do not run, all are compiled anew: NOT_FOUND: a kernel" in caplog.text
    assert serve(server) == wanted
    failures += ["INTERNAL: it fails again"] * 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="again"):
        TinyServer(compile_cache=folder)


def triple(x: jax.Array) -> jax.Array:
    return x * 3 + 2


def test_a_program_out_of_xlas_cache_is_not_kept_on_the_cpu(folder: Path, lowered: list[str]) -> None:
    """XLA:CPU would write it without its machine code."""
    use_compile_cache(folder)
    shelf = open_shelf(folder / "programs", jax.devices()[:1])
    lowerings = {"triple": lambda: jax.jit(triple).lower(jnp.arange(5.0))}
    _, loaded = load_or_compile(shelf, lowerings, 1, lambda _: None)
    assert (loaded, shelf.load("triple") is not None) == (set(), True)
    shelf.drop(["triple"])
    _, loaded = load_or_compile(shelf, lowerings, 1, lambda _: None)  # from this process's memory
    assert (loaded, shelf.load("triple")) == (set(), None)
    jax.clear_caches()
    _, loaded = load_or_compile(shelf, lowerings, 1, lambda _: None)
    assert (loaded, shelf.load("triple")) == (set(), None)
    assert lowered == ["triple"] * 3


def test_a_program_or_folder_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    nowhere = open_shelf(tmp_path / "file" / "programs", jax.devices()[:1])
    assert nowhere.folder is None and "programs are not kept" in caplog.text
    program = jax.jit(triple).lower(jnp.arange(5.0)).compile()
    nowhere.save("triple", program, fresh=True)
    nowhere.save_pool(Pool(3, 4))
    assert nowhere.load("triple") is None and nowhere.load_pool() is None
    gone = Shelf(tmp_path / "gone", tuple(jax.devices()[:1]), "facts")
    gone.save("triple", program, fresh=True)
    assert "cannot keep the program triple" in caplog.text


def test_the_pool_of_an_earlier_start_is_taken_where_it_still_fits(tmp_path: Path) -> None:
    pool = Pool(100, 7)
    assert [pool.pages_for(n) for n in (99, 100, 105, 106)] == [99, 100, 100, 106]
    shelf = open_shelf(tmp_path, jax.devices()[:1])
    assert shelf.load_pool() is None
    shelf.save_pool(pool)
    assert shelf.load_pool() == pool
    assert shelf.about("another model").load_pool() is None
    next(tmp_path.iterdir()).write_text('{"num_pages": 3')
    assert shelf.load_pool() is None


def test_facts_know_versions_sources_devices_and_settings() -> None:
    one, two = (common_facts(jax.devices()[:n]) for n in (1, 2))
    assert one == common_facts(jax.devices()[:1]) != two
    text = str(one)
    assert jax.__version__ in text and saved.sources_digest() in text and "xla_force_host_platform" in text
    assert "jax_default_matmul_precision" in text and "jax_compilation_cache_dir" not in text


def test_whole_files_only_and_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "used", "old")):
        write_whole(tmp_path / name, bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    drop_oldest(tmp_path, 250)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used"}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_whole(tmp_path / "third", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used"}
