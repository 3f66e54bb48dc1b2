"""Where the CTAs of one kernel meet: takes words of global memory, says who came last or lets all wait for all.

With it a kernel merges the results of several CTAs itself, without a second launch. Pallas has no atomic that gives the
old value, so this is inline PTX. It cannot run in the interpreter: a kernel that uses it keeps a form that does not.

Memory model (PTX, "causality order"). Each warpgroup that arrives has first stored its results. `bar.sync` orders the
stores of all its 128 threads before what its first thread does next; that thread's `atom.acq_rel.gpu` releases them,
because a release is cumulative, and acquires what earlier arrivals released, because the read-modify-writes of a word
form one chain; the closing barrier orders the other threads' loads after it. So whoever is told that all have arrived
may read all results with ordinary loads. (An acquire at GPU scope also drops what the SM's L1 cache holds.) What the
copy engine stores and loads belongs to another proxy: `async_stores` and `async_reads` add the fences between the two.
Its stores must be complete, not only read out of shared memory: `plgpu.wait_smem_to_gmem(0)` before arriving.

The words are an input of the kernel that it changes and leaves as it found them (`last_to_arrive`) or with whole rounds
added (the others). JAX holds them to be constant. That is safe because all work from any such state, so it does not
matter whether XLA copies the words, makes them anew, or gives the same ones to the next layer's call; and because the
calls that share them run one after the other: each needs what the one before gave. Two kernels that do not depend on
each other may be run at once by a CUDA graph: give them words of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

_SCALAR = plgpu.Layout.WG_SPLAT
_PROXY_FENCE = "fence.proxy.async;"


def zero_words(not_negative: jax.Array) -> jax.Array:
    """int32 zeros of the same shape, made with a step's work list and so once a step.

    Computed from values that are never negative, and not a constant: XLA may merge equal constants, and these words
    are not constant while a kernel runs.
    """
    return lax.shift_right_logical(not_negative.astype(jnp.int32), jnp.int32(31))


def last_to_arrive(
    word: jax.Ref, count: jax.Array | int, *, async_stores: bool = False, async_reads: bool = False
) -> jax.Array:
    """True for the last of `count` warpgroups, one a CTA, that arrive at `word`; it may read what all have stored.

    Nobody waits, so any grid may use it. The word is 0 before the first arrival and 0 again after the last.

    Args:
      word: one int32 of global memory, e.g. `words_A.at[part]`.
      count: int32, at least 1, the same for all that arrive at the word.
      async_stores: the results were stored by the copy engine. async_reads: they will be read by it.

    Returns:
      A scalar bool, the same in all threads of the warpgroup. All its threads must call, converged.
    """
    return _meet(_LAST, word, count, async_stores, async_reads)() != 0


def arrive_and_wait(
    word: jax.Ref, count: jax.Array | int, *, async_stores: bool = False, async_reads: bool = False
) -> None:
    """Returns when `count` warpgroups, one a CTA, have arrived at `word`; then each may read what all have stored.

    All CTAs that meet must be resident at once, or those that wait keep the others from starting, for ever: the grid
    must not exceed the SMs times the CTAs that fit on one, and no other kernel that waits may run beside this one.
    The word only grows, by `count` a round: 0, or any whole number of rounds, before the first arrival.

    Args and threads: as for last_to_arrive.
    """
    _meet(_WAIT, word, count, async_stores, async_reads)()


def arrive(word: jax.Ref, *, async_stores: bool = False) -> None:
    """Counts as one arrival at a word of `arrive_and_wait`, and goes on: for who has nothing to read afterwards."""
    _meet(_ARRIVE, word, 0, async_stores, False)()


# $0 result, $1 address of the word, $2 count, $3 number of the thread in its warpgroup, $4 the warpgroup's barrier.
# `inc` wraps to 0 past its limit: no one has to reset the word. `bar.red` gives the first thread's answer to all.
_LAST = """{{
.reg .pred first, last; .reg .b32 old, limit;
{before} bar.sync $4, 128;
setp.eq.u32 first, $3, 0;
sub.u32 limit, $2, 1;
mov.b32 old, 0;
@first atom.acq_rel.gpu.global.inc.u32 old, [$1], limit;
setp.eq.and.u32 last, old, limit, first;
bar.red.or.pred last, $4, 128, last;
selp.b32 $0, 1, 0, last;
{after}
}}"""
# The round of an arrival ends at the next multiple of the count; the difference is signed, as words may wrap.
_WAIT = """{{
.reg .pred first, early; .reg .b32 old, target, seen;
{before} bar.sync $4, 128;
setp.eq.u32 first, $3, 0;
@!first bra met;
atom.acq_rel.gpu.global.add.u32 old, [$1], 1;
rem.u32 target, old, $2;
sub.u32 target, old, target;
add.u32 target, target, $2;
again:
ld.acquire.gpu.global.u32 seen, [$1];
sub.u32 seen, seen, target;
setp.lt.s32 early, seen, 0;
@early bra again;
met:
bar.warp.sync 0xffffffff;
bar.sync $4, 128;
mov.b32 $0, 0;
{after}
}}"""
_ARRIVE = """{{
.reg .pred first;
{before} bar.sync $4, 128;
setp.eq.u32 first, $3, 0;
@first red.release.gpu.global.add.u32 [$1], 1;
mov.b32 $0, $2;
{after}
}}"""


def _meet(
    template: str, word: jax.Ref, count: jax.Array | int, async_stores: bool, async_reads: bool
) -> Callable[[], jax.Array]:
    ptx = template.format(before=_PROXY_FENCE * async_stores, after=_PROXY_FENCE * async_reads)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
    )
    def meet(_: object, word_ref: ir.Value, count: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.andi(mgpu.thread_idx(), mgpu.c(127, i32))
        barrier = arith.addi(mgpu.warpgroup_idx(sync=False), mgpu.c(1, i32))  # as Mosaic numbers them; 0 is the CTA's
        operands = [mgpu_utils.memref_ptr(word_ref), count.registers.item(), thread, barrier]
        result = llvm.inline_asm(i32, operands, ptx, "=&r,l,r,r,r,~{memory}", has_side_effects=True, convergent=True)
        return mgpu.FragmentedArray.splat(result, (), is_signed=True)

    meet_typed: Any = meet  # the decorator's result takes no context
    return lambda: meet_typed(word, jnp.asarray(count, jnp.int32))
