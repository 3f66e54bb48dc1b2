"""The training loop: takes rows and options; keeps the state, the log and the picture up to date until time is up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from demo_model.train.data import TokenRows, by_kind, rows_of_step
from demo_model.train.loss import Losses
from demo_model.train.options import FIRST_STEPS, MEASURED_STEPS, Options
from demo_model.train.plot import plot
from demo_model.train.report import Log
from demo_model.train.schedule import Rates, rates
from demo_model.train.state import TrainState, restore, save
from demo_model.train.step import Measured, Trainer
from jaxserve.errors import ConfigError

STEPS_SHARE = 0.95  # of the time that is left; validations and saved states take the rest
IN_FLIGHT = 2  # steps that the host may be ahead of the device; reading a result waits for it
Clock = Callable[[], float]


@dataclass(slots=True)
class Budget:
    """Seconds since the process began, and how long a step takes."""

    options: Options
    clock: Clock
    started_s: float
    step_s: float = 0.0
    marks: list[tuple[int, float]] = field(default_factory=list)  # steps that are done, and when

    @property
    def spent_s(self) -> float:
        """Since the process began."""
        return self.clock() - self.started_s

    @property
    def left_s(self) -> float:
        """For steps; endless without a limit."""
        minutes = self.options.minutes
        return float("inf") if minutes is None else minutes * 60 - self.options.closing_s - self.spent_s

    def done(self, step: int) -> None:
        """A step's result has come."""
        self.marks.append((step, self.clock()))
        (first, begun), (last, ended) = self.marks[max(0, len(self.marks) - MEASURED_STEPS - 1)], self.marks[-1]
        self.step_s = (ended - begun) / max(1, last - first)

    def steps(self, step: int) -> int | None:
        """Of the whole schedule, once enough steps were timed: what fits into the time that is left."""
        if len(self.marks) < FIRST_STEPS + MEASURED_STEPS:
            return None
        return step + max(1, int(STEPS_SHARE * self.left_s / self.step_s))


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a run lives, and the rows it is given."""

    folder: Path
    train: TokenRows
    validation: TokenRows
    chat_token_id: int


def run(trainer: Trainer, weights: list[jax.Array], place: Place, started_s: float, resume: bool = False) -> TrainState:
    """Train to the end of the schedule or of the minutes; the state is saved, the log and its picture are written.

    `started_s` is when the process began, by time.monotonic.
    """
    options, state, step, steps = trainer.options, trainer.start(weights), 0, trainer.options.steps
    if resume:
        state, record = restore(place.folder, state)
        step, steps = int(record["step"]), options.steps or record["steps"]
        print(f"resumed at step {step} of {steps}", flush=True)
    log = Log(place.folder / "log.jsonl", step)
    check = validation(trainer, place)
    arrays = place.train.on_device()
    budget, pending = Budget(options, time.monotonic, started_s), deque()
    while (steps is None or step < steps) and budget.left_s > IN_FLIGHT * budget.step_s:
        given = rates(step, steps or 1 << 30, options)
        row_PI = rows_of_step(step, len(place.train.token_NC), options.batch_rows, options.seed)
        state, measured = trainer.step(state, *arrays, row_PI.reshape(-1, options.part_rows), given)
        step += 1
        pending.append((step, given, measured))
        while len(pending) > IN_FLIGHT:
            take(pending.popleft(), log, budget, options)
        if steps is None:
            steps = budget.steps(step)
            if steps is not None:
                print(f"{budget.step_s:.3f} s a step: {steps} steps fit the time", flush=True)
        if step % options.validate_steps == 0:
            check(state, step, log)
        if step % options.save_steps == 0:
            save(place.folder, state, {"step": step, "steps": steps})
    while pending:
        take(pending.popleft(), log, budget, options)
    if step % options.validate_steps:
        check(state, step, log)
    save(place.folder, state, {"step": step, "steps": steps})
    plot(log.lines, place.folder / "curves.png")
    print(f"stopped after step {step} of {steps}, {budget.spent_s:.0f} s", flush=True)
    return state


def take(done: tuple[int, Rates, Measured], log: Log, budget: Budget, options: Options) -> None:
    """Wait for a step's results and log them."""
    step, given, measured = done
    jax.block_until_ready(measured)
    budget.done(step)
    tokens_per_s = options.batch_rows * options.row_tokens / budget.step_s if budget.step_s else 0.0
    if not np.isfinite(float(measured.gradient_norm)):
        raise ConfigError(
            f"--rate: step {step} at {given.learning:.2g} has no finite gradient, allowed: a smaller rate"
        )
    log.train(step, measured, learning_rate=float(given.learning), tokens_per_s=tokens_per_s, spent_s=budget.spent_s)


def validation(trainer: Trainer, place: Place) -> Callable[[TrainState, int, Log], None]:
    """A function that logs the losses on held-out chats and prose."""
    part = min(trainer.options.part_rows, len(place.validation.token_NC))
    usable = len(place.validation.token_NC) // part * part
    kinds = by_kind(place.validation, trainer.bos_token_id, place.chat_token_id)
    tokens = jax.device_put(place.validation.token_NC[:usable].reshape(-1, part, place.validation.token_NC.shape[1]))
    counts = {kind: jax.device_put(count[:usable].reshape(tokens.shape)) for kind, count in kinds.items()}

    def check(state: TrainState, step: int, log: Log) -> None:
        for kind, count in counts.items():
            found = [trainer.validate(state.weights, *pair) for pair in zip(tokens, count, strict=True)]
            log.validation(step, kind, Losses(*np.sum([[float(value) for value in one] for one in found], axis=0)))

    return check
