"""Starting a runner: the pool's size, donation and copies in the compiled steps, weights that do not fit, the cache."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError, ConfigError, DeviceError
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.compile import CompileCounter, drop_damaged_entries, use_compile_cache
from jaxserve.runtime.pool import PoolRequest, pages_per_sequence, pool_pages
from jaxserve.runtime.start import reserved_bytes
from jaxserve.runtime.weights import load_weights, random_weights
from tests.fakes.tiny import CONFIG, TinyServer

REQUEST = PoolRequest(1000, 16, 100, 4, None, None, 0.5)


def test_pool_takes_what_is_left() -> None:
    assert pages_per_sequence(REQUEST) == 7
    assert pool_pages(REQUEST, 100_000, 30_000, 5_000) == 15
    assert pool_pages(REQUEST, 10**9, 0, 0) == 28  # no more than all slots could use
    assert pool_pages(replace(REQUEST, num_pages=3), 0, 0, 0) == 3
    assert pool_pages(replace(REQUEST, cache_memory_bytes=9_999), 0, 0, 0) == 9


def test_pool_errors_give_the_sum() -> None:
    with pytest.raises(DeviceError, match=r"0\.5 - weights and state .* - workspace .* raise --gpu-memory-utilization"):
        pool_pages(REQUEST, 10_000, 4_500, 0)
    with pytest.raises(ConfigError, match="--cache-memory-gb: got 0.000, allowed: at least"):
        pool_pages(replace(REQUEST, cache_memory_bytes=10), 0, 0, 0)


def test_b143_a_share_that_could_not_be_reserved_is_refused() -> None:
    assert reserved_bytes({"bytes_limit": 100, "pool_bytes": 100}, True) == 100
    assert reserved_bytes({"bytes_limit": 100, "pool_bytes": 5}, False) == 100  # grows on demand
    with pytest.raises(DeviceError, match=r"asks for 100\.0 GB .* only 60\.0 GB could be reserved: another process"):
        reserved_bytes({"bytes_limit": 100 * 10**9, "pool_bytes": 60 * 10**9}, True)


def test_b141_no_step_copies_a_cache_and_all_state_is_donated(tiny: TinyServer) -> None:
    caches = jax.tree.leaves(tiny.runner.state.caches)
    dims = ",".join(map(str, caches[0].shape))
    for bucket, step in tiny.runner.programs.steps.items():
        text = step.as_text()
        copies = re.findall(rf"f32\[{dims}\]\S* copy\(", text)
        assert not copies, f"{bucket}: {len(copies)} copies of a cache"
        header = text.splitlines()[0]
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", header)
        assert aliases is not None
        count = aliases.group(1).count("alias)")
        assert count == len(jax.tree.leaves(tiny.runner.state)), f"{bucket}: {count} arrays are updated in place"
        workspace = step.memory_analysis().temp_size_in_bytes
        assert workspace < 40 * caches[0].nbytes, "a dense copy of the pages was made"


def test_no_donation_warning_and_stable_buffers(tiny: TinyServer) -> None:
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tiny.runner.state.caches)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.run([tiny.request([5, 6, 7], 4)])
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tiny.runner.state.caches)] == before


def test_recover_makes_a_new_state_when_the_donated_one_is_lost(tiny: TinyServer) -> None:
    want = tiny.run([tiny.request([5, 6, 7], 4)])[0].token_ids
    assert tiny.runner.recover()
    jax.tree.leaves(tiny.runner.state.caches)[0].delete()
    assert tiny.runner.recover()
    assert tiny.run([tiny.request([5, 6, 7], 4)])[0].token_ids == want


def test_random_weights_are_spread_and_repeatable() -> None:
    split = split_decoder(model_spec(CONFIG), jnp.dtype("bfloat16"), make_mesh(jax.devices()))
    first, again, other = random_weights(split, 3), random_weights(split, 3), random_weights(split, 4)
    for name, a, b, c in zip(split.names, first, again, other, strict=True):
        assert a.dtype == jnp.bfloat16 and np.array_equal(a, b)
        values = np.asarray(a, np.float32)
        if name.endswith(".scale"):
            assert (values == 1).all()
        else:
            assert values.std() == pytest.approx(0.02, rel=0.05) and not np.array_equal(a, c)


def test_weights_that_do_not_fit_are_named() -> None:
    split = split_decoder(model_spec(CONFIG), jnp.dtype("float32"), make_mesh(jax.devices()))
    good = dict(zip(split.names, random_weights(split, 0), strict=True))
    assert len(load_weights(split, lambda wanted: good)) == len(split.names)
    with pytest.raises(CheckpointError, match=r"missing \['norm.scale'\], unknown \['extra'\]"):
        load_weights(split, lambda wanted: {"extra" if k == "norm.scale" else k: v for k, v in good.items()})
    with pytest.raises(CheckpointError, match=r"embed.weight: got float32\[64, 128\], expected float32\[128, 64\]"):
        load_weights(split, lambda wanted: good | {"embed.weight": good["embed.weight"].T})
    with pytest.raises(CheckpointError, match="norm.scale: got"):
        load_weights(split, lambda wanted: good | {"norm.scale": wanted["norm.scale"]})


@pytest.fixture
def compile_cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "compiled"
    use_compile_cache(folder)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield folder
    use_compile_cache(None)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def compile_once() -> None:
    def triple(x: jax.Array) -> jax.Array:
        return x * 3 + 2

    jax.jit(triple).lower(jnp.arange(5.0)).compile()


def test_a_cache_folder_that_cannot_be_made_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    use_compile_cache(tmp_path / "file" / "compiled")
    assert jax.config.jax_compilation_cache_dir is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"--compile-cache-dir: got {tmp_path}/file/compiled, which cannot be made")
    compile_once()


def test_second_compilation_hits_and_a_damaged_entry_is_replaced(compile_cache: Path) -> None:
    x = jnp.arange(5.0)  # its own small programs are compiled before we count
    del x
    compile_once()
    (entry,) = compile_cache.glob("jit_triple-*-cache")
    counter = CompileCounter()
    compile_once()
    assert counter.cache_hits >= 1
    counter.close()
    entry.write_bytes(entry.read_bytes()[:20])
    with drop_damaged_entries(compile_cache):
        compile_once()
    assert not entry.exists()
    compile_once()
    assert entry.exists()
