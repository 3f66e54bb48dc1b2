"""The copying side of the prefill kernels: items, their queries, and key blocks as far ahead as the ring allows.

A kernel hands in `r`: what tile_attention.py names, table_RM, q_THE, pool_pages, page_tokens, copy_registers, and three
functions. look_up(index) gives an item's words (see tile_queue.py; 0 blocks where there is none), its chunk and a
number of the kernel's own; fetch_keys and fetch_values(stage, block, pages, number) start the copies of a key block.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tile_queue
from pallas_kernels.tile_attention import COLUMNS, ROWS


def copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: queries, keys and values of one item after the other."""
    if r.native:
        plgpu.set_max_registers(r.copy_registers, action="decrease")

    def known(turn: jax.Array, index: jax.Array) -> tuple[jax.Array, ...]:
        words, chunk, number = r.look_up(index)
        tile_queue.publish(r, turn, words)
        item = (words[tile_queue.BLOCKS], words[tile_queue.ROW], words[tile_queue.HEAD], chunk, number)
        return *item, *_places(r, chunk, 0)

    def one_item(state: tuple[Any, ...]) -> tuple[Any, ...]:
        turn, done, (blocks, row, head, chunk, number, *first_places) = state

        def fetch(block: jax.Array | int, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = _places(r, chunk, block + 1)  # read before the waits, which then hide its latency
            stage = lax.rem(done + block, jnp.int32(r.stages))
            reused = done + block >= r.stages
            pl.when(reused)(lambda: plgpu.barrier_wait(r.k_free.at[stage]))
            r.fetch_keys(stage, block, now, number)
            if isinstance(block, int):
                _copy_queries(r, turn, row, head)
            pl.when(reused)(lambda: plgpu.barrier_wait(r.v_free.at[stage]))
            r.fetch_values(stage, block, now, number)
            return following

        # The next item is taken late (see tile_queue.py), and looked up while the ring is full: three trips to memory,
        # one after the other.
        late = jnp.maximum(blocks - 1, 1)
        following = lax.fori_loop(1, late, fetch, fetch(0, tuple(first_places)))
        after = known(turn + 1, tile_queue.take(r, turn + 1))
        lax.fori_loop(late, blocks, fetch, following)
        return turn + 1, done + blocks, after

    state = (jnp.int32(0), jnp.int32(0), known(jnp.int32(0), r.cta))
    _, done, _ = lax.while_loop(lambda state: state[2][0] > 0, one_item, state)
    tile_queue.close(r)
    _drain(r, done)


def _places(r: SimpleNamespace, chunk: jax.Array, block: jax.Array | int) -> tuple[jax.Array, ...]:
    """The pages of a block. The last one may reach past the request's pages, where entries may be anything."""
    pages = r.block // r.page_tokens
    indices = [jnp.minimum(block * pages + i, r.table_RM.shape[1] - 1) for i in range(pages)]
    return tuple(jnp.clip(r.table_RM[chunk, i], 0, r.pool_pages - 1) for i in indices)


def _copy_queries(r: SimpleNamespace, turn: jax.Array, row: jax.Array, head: jax.Array) -> None:
    """Both sides' queries of an item, each as soon as the side is done with those before."""
    for side in range(2):
        pl.when(turn > 0)(lambda side=side: plgpu.barrier_wait(r.q_free.at[side]))
        for i in range(r.q_THE.shape[2] // COLUMNS):
            part = r.q_THE.at[pl.ds(row + side * ROWS, ROWS), head, pl.ds(i * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(part, r.q_any_2XJC.at[side, i], r.q_full.at[side])


def _drain(r: SimpleNamespace, done: jax.Array) -> None:
    """At the end: every completion of a barrier must have been waited for. done: key blocks."""

    @pl.loop(jnp.maximum(done - r.stages, 0), done)
    def _(block: jax.Array) -> None:
        stage = lax.rem(block, jnp.int32(r.stages))
        plgpu.barrier_wait(r.k_free.at[stage])
        plgpu.barrier_wait(r.v_free.at[stage])

    @pl.when(done > 0)
    def _() -> None:
        for side in range(2):
            plgpu.barrier_wait(r.q_free.at[side])
