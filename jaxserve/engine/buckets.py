"""Which compiled program a step runs in: sizes from config in, a Bucket for `schedule` and the warm-up list out."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jaxserve.batch import Bucket, Program
from jaxserve.config import RuntimeConfig, ScheduleConfig, decode_buckets, mixed_buckets
from jaxserve.errors import ConfigError

SCORED_TOKENS = 256  # a scored step holds float32 logits of every packed token: 256 of 128k ids are 128 MiB


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes of all step programs, each list rising. They add up, they do not multiply.

    Under `deterministic` decode steps have one size: a product of matrices may round otherwise where it has more rows.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    scored_tokens: int

    @classmethod
    def from_config(cls, runtime: RuntimeConfig, schedule: ScheduleConfig) -> Buckets:
        """The lists of a resolved config. Raises ConfigError where some step would fit into no bucket."""
        seqs = schedule.max_num_seqs
        decode = tuple(sorted(set(runtime.decode_buckets or decode_buckets(seqs))))
        mixed = tuple(sorted(set(runtime.mixed_buckets or mixed_buckets(schedule.max_num_batched_tokens))))
        for flag, sizes, least in (("--decode-buckets", decode, seqs), ("--mixed-buckets", mixed, seqs + 1)):
            if sizes[0] < 1 or sizes[-1] < least:
                raise ConfigError(f"{flag}: got {sizes}, allowed: sizes of at least 1, the largest at least {least}")
        if runtime.deterministic:
            decode = decode[-1:]
        return cls(decode, mixed, min(SCORED_TOKENS, mixed[-1]))

    def choose(self, program: Program, rows: int) -> Bucket:
        """The smallest bucket of `program` that takes `rows` rows; the caller never asks for more than the largest."""
        if program is Program.SCORED:
            assert rows <= self.scored_tokens, (rows, self)
            return Bucket(program, self.scored_tokens)
        sizes = self.decode_rows if program is Program.DECODE else self.mixed_tokens
        return Bucket(program, sizes[bisect_left(sizes, rows)])

    def all(self) -> list[Bucket]:
        """Every program in warm-up order."""
        decode = [Bucket(Program.DECODE, rows) for rows in self.decode_rows]
        mixed = [Bucket(Program.MIXED, tokens) for tokens in self.mixed_tokens]
        return [*decode, *mixed, Bucket(Program.SCORED, self.scored_tokens)]
