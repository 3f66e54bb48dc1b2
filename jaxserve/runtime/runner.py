"""Runs compiled steps on the device: takes Installs and Batches from the engine, gives a pending StepOut back.

Nothing here waits for the device but `Pending.result`, so step n+1 can be dispatched before step n's tokens are read.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.batch import FLAG_LOGPROBS, FLAG_RANDOM, FLAGS_WORD, Batch, Bucket, Install, Layout, StepOut
from jaxserve.mesh import sharding
from jaxserve.runtime.compile import CompileCounter
from jaxserve.runtime.sample import Scores
from jaxserve.runtime.state import (
    INSTALL_ROWS,
    SlotTables,
    State,
    WideRow,
    make_state,
    plain_rows,
    row_flags,
    scratch_row,
    table_rows,
    wide_row,
)
from jaxserve.runtime.step import Out, StepOptions

log = logging.getLogger("jaxserve.runner")

GPU_WARM_ROUNDS = 3  # XLA records a command buffer on an executable's second run and settles on the third


@dataclasses.dataclass(frozen=True, slots=True)
class Programs:
    """Everything compiled: the steps by bucket, their plain forms (a GPU's only), and those that install slots."""

    steps: dict[Bucket, jax.stages.Compiled]
    plain: dict[Bucket, jax.stages.Compiled]
    install_plain: jax.stages.Compiled
    install_wide: jax.stages.Compiled
    install_table: jax.stages.Compiled


class Pending:
    """A dispatched step. `result` waits for it; the copies to the host are already under way."""

    def __init__(self, out: Out, with_logprobs: bool) -> None:
        self.tokens = out.sampled.token_bad_2Q
        self.scores = out.sampled.scores if with_logprobs else None
        self.prompt_scores = out.prompt_scores
        for array in jax.tree.leaves((self.tokens, self.scores, self.prompt_scores)):
            array.copy_to_host_async()

    def result(self) -> StepOut:
        """The step's results as numpy arrays; blocks until the device has them."""
        tokens, bad = np.asarray(self.tokens).transpose(1, 0, 2)
        chosen, ranks, top_ids, top = host(self.scores)
        score_chosen, score_ranks, score_top_ids, score_top = host(self.prompt_scores)
        return StepOut(
            token_ids=tokens,
            bad_rows=bad.astype(bool),
            chosen_logprobs=chosen,
            chosen_ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top,
            score_chosen=score_chosen,
            score_ranks=score_ranks,
            score_top_ids=score_top_ids,
            score_top=score_top,
        )


def host(scores: Scores | None) -> tuple[np.ndarray | None, ...]:
    """The four arrays of Scores on the host, or four Nones."""
    if scores is None:
        return None, None, None, None
    return tuple(np.asarray(x) for x in (scores.chosen_Q, scores.rank_Q, scores.top_id_QL, scores.top_QL))


class StepRunner:
    """Owns weights and state. Not thread-safe: only the engine's loop calls it."""

    def __init__(
        self,
        leaves: Sequence[jax.Array],
        state: State,
        state_shapes: State,
        programs: Programs,
        options: StepOptions,
        mesh: Mesh,
        vocab_rows: int,
    ) -> None:
        self.leaves = list(leaves)
        self.state, self.state_shapes = state, state_shapes
        self.programs = programs
        self.shape = options.shape
        self.replicated, self.by_lane = sharding(mesh), sharding(mesh, "data")
        self.vocab_rows = vocab_rows
        self.counter = CompileCounter()

    @property
    def buckets(self) -> list[Bucket]:
        """The compiled step programs."""
        return list(self.programs.steps)

    @property
    def compilations_after_warmup(self) -> int:
        """Compilations since `warm_up`; anything but 0 is a fault."""
        return self.counter.compilations

    def install(self, installs: list[Install]) -> None:
        """Fill slots before their first step."""
        for first in range(0, len(installs), INSTALL_ROWS):
            self._install_plain(plain_rows(installs[first : first + INSTALL_ROWS], self.shape))
        for install in installs:
            if row_flags(install):
                self._install_wide(wide_row(install, self.shape, self.vocab_rows))
        sharing = [install for install in installs if len(install.page_ids)]
        for first in range(0, len(sharing), INSTALL_ROWS):
            self._install_table(table_rows(sharing[first : first + INSTALL_ROWS], self.shape))

    def dispatch(self, batch: Batch) -> Pending:
        """Start a step and return at once."""
        flags = int(batch.vector[0, FLAGS_WORD])  # the same for all lanes
        is_plain = flags & ~FLAG_RANDOM == 0 and batch.bucket in self.programs.plain
        step = (self.programs.plain if is_plain else self.programs.steps)[batch.bucket]
        # As a numpy argument, like those of installs: a device_put costs twice what the call takes for it.
        self.state, out = step(self.leaves, self.state, batch.vector)
        return Pending(out, with_logprobs=bool(flags & FLAG_LOGPROBS))

    def recover(self) -> bool:
        """After an exception: wait for what was dispatched; where the donated state is lost, make a new one.

        False where the device does not even do that.
        """
        try:
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(self.state) if not leaf.is_deleted()])
            lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        except jax.errors.JaxRuntimeError as error:
            log.warning("the state of the failed step cannot be read: %s", error)
            lost = True
        if not lost:
            return True
        try:
            self.state = make_state(self.state_shapes)
        except jax.errors.JaxRuntimeError:
            log.exception("no new state can be made")
            return False
        return True

    def warm_up(self) -> float:
        """Run every program with padding through the real path until XLA has settled; returns seconds taken."""
        start_s = time.perf_counter()
        on_cpu = next(iter(self.leaves[0].devices())).platform == "cpu"
        for _ in range(1 if on_cpu else GPU_WARM_ROUNDS):
            self._install_plain(plain_rows([], self.shape))
            self._install_wide(scratch_row(self.shape, self.vocab_rows))
            self._install_table(table_rows([], self.shape))
            for bucket in self.programs.steps:
                for flags in (0, FLAG_LOGPROBS):  # the plain form, where there is one, and the full one
                    vector = Layout(bucket, self.shape).empty()
                    vector[FLAGS_WORD] = flags
                    self.dispatch(Batch(bucket, np.tile(vector, (self.shape.lanes, 1)))).result()
        jax.block_until_ready(self.state)
        self.counter.close()
        self.counter = CompileCounter()
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Free the device memory at once."""
        self.drop_state()
        for leaf in self.leaves:
            leaf.delete()
        self.leaves = []

    def drop_state(self) -> None:
        """Free the state's memory; the weights stay for another runner."""
        self.counter.close()
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def _install_plain(self, rows_ZIW: np.ndarray) -> None:
        self._set_slots(self.programs.install_plain(self.state.slots, rows_ZIW))

    def _install_wide(self, row: WideRow) -> None:
        placed = jax.tree.map(lambda array: jax.device_put(array, self.replicated), row)
        placed = dataclasses.replace(placed, slot_Z=jax.device_put(row.slot_Z, self.by_lane))
        self._set_slots(self.programs.install_wide(self.state.slots, placed))

    def _install_table(self, rows_ZIW: np.ndarray) -> None:
        table_SM = self.programs.install_table(self.state.table_SM, rows_ZIW)
        self.state = dataclasses.replace(self.state, table_SM=table_SM)

    def _set_slots(self, slots: SlotTables) -> None:
        self.state = dataclasses.replace(self.state, slots=slots)
