"""Bucket lists from config and the choice among them."""

from __future__ import annotations

import pytest

from jaxserve.batch import Bucket, Program
from jaxserve.config import RuntimeConfig, ScheduleConfig
from jaxserve.engine.buckets import Buckets
from jaxserve.errors import ConfigError

SCHEDULE = ScheduleConfig(max_num_seqs=16, max_num_batched_tokens=512)
RUNTIME = RuntimeConfig(decode_buckets=(1, 4, 16), mixed_buckets=(64, 512))


@pytest.mark.parametrize(
    ("program", "rows", "chosen"),
    [
        (Program.DECODE, 1, 1),
        (Program.DECODE, 2, 4),
        (Program.DECODE, 4, 4),
        (Program.DECODE, 16, 16),
        (Program.MIXED, 3, 64),
        (Program.MIXED, 65, 512),
        (Program.SCORED, 3, 256),
    ],
)
def test_the_smallest_that_fits(program: Program, rows: int, chosen: int) -> None:
    assert Buckets.from_config(RUNTIME, SCHEDULE).choose(program, rows) == Bucket(program, chosen)


def test_the_warm_up_list_holds_each_program_once() -> None:
    buckets = Buckets.from_config(RUNTIME, SCHEDULE).all()
    assert [(bucket.program.value, bucket.rows) for bucket in buckets] == [
        ("decode", 1),
        ("decode", 4),
        ("decode", 16),
        ("mixed", 64),
        ("mixed", 512),
        ("scored", 256),
    ]


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (RuntimeConfig(decode_buckets=(1, 8)), "--decode-buckets: got .1, 8., allowed: .* the largest at least 16"),
        (RuntimeConfig(decode_buckets=(0, 16)), "--decode-buckets"),
        (RuntimeConfig(mixed_buckets=(16,)), "--mixed-buckets: .* at least 17"),
    ],
)
def test_lists_that_leave_a_step_without_a_program(runtime: RuntimeConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Buckets.from_config(runtime, SCHEDULE)
