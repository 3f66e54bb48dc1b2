"""grid_sync: it compiles for the GPU; on one, the last CTA of a group, and all that wait, see all results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grid_sync

CTAS, GROUP, WIDTH = 128, 16, 512
ROW = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=4)


def sums(x: jax.Array, words: jax.Array, *, wait: bool) -> tuple[jax.Array, jax.Array]:
    """Each CTA stores a row; of each group the last to arrive adds them, or all wait and each adds them for itself."""

    def grid_sync_test(x_r: jax.Ref, words_r: jax.Ref, stored_r: jax.Ref, out_r: jax.Ref, words_out: jax.Ref) -> None:
        cta = lax.axis_index("cta")
        group = lax.div(cta, jnp.int32(GROUP))
        stored_r.at[cta][...] = plgpu.load(x_r.at[cta], layout=ROW) * 2.0

        def add() -> None:
            total = plgpu.layout_cast(jnp.zeros((WIDTH,), jnp.float32), ROW)
            rows = lax.fori_loop(
                0, GROUP, lambda i, acc: acc + plgpu.load(stored_r.at[group * GROUP + i], layout=ROW), total
            )
            out_r.at[cta if wait else group][...] = rows

        if wait:
            grid_sync.arrive_and_wait(words_r.at[group], GROUP)
            add()
        else:
            pl.when(grid_sync.last_to_arrive(words_r.at[group], GROUP))(add)
        words_out[cta] = words_r[group]

    out_rows = CTAS if wait else CTAS // GROUP
    kernel = plgpu.kernel(
        grid_sync_test,
        out_type=(
            jax.ShapeDtypeStruct((CTAS, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((out_rows, WIDTH), jnp.float32),
            jax.ShapeDtypeStruct((CTAS,), jnp.int32),
        ),
        grid=(CTAS,),
        grid_names=("cta",),
    )
    return kernel(x, words)[1:]


def words_for(lengths: jax.Array) -> jax.Array:
    return grid_sync.zero_words(lengths[: CTAS // GROUP])


@pytest.mark.parametrize("wait", [False, True])
def test_it_lowers_for_the_gpu(wait: bool) -> None:
    x, lengths = jax.ShapeDtypeStruct((CTAS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    call = jax.jit(lambda x, lengths: sums(x, words_for(lengths), wait=wait))
    assert "mosaic_gpu_v2" in call.trace(x, lengths).lower(lowering_platforms=("cuda",)).as_text()


def test_words_are_zeros_that_are_no_constant() -> None:
    """A constant could be one array for several uses, and a kernel writes to it."""
    lengths = jnp.array([0, 1, 2**31 - 1], jnp.int32)
    assert not np.asarray(grid_sync.zero_words(lengths)).any()
    text = jax.jit(grid_sync.zero_words).lower(lengths).compile().as_text()
    assert "shift-right-logical" in text


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [False, True])
def test_all_results_are_seen(wait: bool) -> None:
    """Fifty calls on the same words, each with other numbers: a late or stale row would show."""
    lengths = jnp.arange(64, dtype=jnp.int32)

    @jax.jit
    def many(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = words_for(lengths)
        last = jnp.zeros((), jnp.float32)
        outs = []
        for call in range(50):
            out, _ = sums(x + call + 0.0 * last, words, wait=wait)
            last = out[0, 0]
            outs.append(out)
        return jnp.stack(outs), words

    x = np.arange(CTAS * WIDTH, dtype=np.float32).reshape(CTAS, WIDTH) % 97
    outs, _ = many(x)
    for call, out in enumerate(np.asarray(outs)):
        expected = (2 * (x + call)).reshape(-1, GROUP, WIDTH).sum(axis=1)
        assert np.array_equal(out, np.repeat(expected, GROUP, axis=0) if wait else expected), call
