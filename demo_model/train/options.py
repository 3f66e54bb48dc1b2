"""What one training run is told: sizes, rates and limits, with the values that the demo model is trained with."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ConfigError

MEASURED_STEPS = 20  # that are timed where the number of steps follows from the minutes
FIRST_STEPS = 10  # before them: compiling, and the GPU's clocks


@dataclass(frozen=True, slots=True)
class Options:
    """One run. Raises ConfigError for values that do not belong together."""

    row_tokens: int = 1024
    batch_rows: int = 256  # of one step: 262,144 tokens
    part_rows: int = 32  # computed at a time; gradients of the parts of a batch are added up
    steps: int | None = None  # of the whole schedule; None: as many as the minutes allow
    minutes: float | None = None  # from the process's start to its end
    closing_s: float = 30.0  # of them kept for the last validation and for saving
    optimizer: str = "muon"
    rate: float = 3e-3  # the highest; of muon's matrices too, whose updates have AdamW's size
    last_rate: float = 0.02  # share of it that is left at the end of the cosine
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    mtp_weight: float = 0.3
    last_mtp_weight: float = 0.1  # in the last third of the steps
    bias_rate: float = 3e-3  # of the router's bias, for a thousand steps or so; 0 in the last tenth of them
    seed: int = 1
    dtype: str = "bfloat16"  # of the computation; weights are kept in float32
    validate_steps: int = 100
    save_steps: int = 400

    def __post_init__(self) -> None:
        if self.batch_rows % self.part_rows:
            raise ConfigError(
                f"--part-rows: got {self.part_rows}, allowed: what divides --batch-rows {self.batch_rows}"
            )
        if self.steps is None and self.minutes is None:
            raise ConfigError("--steps: got none, allowed: none only where --minutes is given")
        if self.steps is None and self.warmup_steps < FIRST_STEPS + MEASURED_STEPS:
            raise ConfigError(
                f"--warmup-steps: got {self.warmup_steps}, allowed: at least {FIRST_STEPS + MEASURED_STEPS} where "
                "--steps is not given: the schedule must not depend on it so early"
            )
