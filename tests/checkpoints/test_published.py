"""Published checkpoints at full size, as names and shapes: all fit, nothing is left over, and the counts are right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from checkpoints.assemble import check_fit
from checkpoints.fp8 import DequantizedReader, read_scheme
from checkpoints.load import check_targets
from checkpoints.names.families import name_table
from checkpoints.names.table import NameTable
from checkpoints.readers.reader import TensorInfo
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import model_spec
from tests.checkpoints import published

CASES: dict[str, tuple[dict[str, Any], float, float]] = {  # billions of parameters, and of the MTP layer's
    "V2-Lite": (published.V2_LITE, 15.71, 0),
    "V3": (published.V3, 671.03, 11.61),
    "GLM-4.5-Air": (published.GLM_45_AIR, 106.85, 2.38),
    "GLM-4.7-Flash": (published.GLM_47_FLASH, 29.94, 0.64),
    "GLM-4-9B-chat": (published.GLM_4_9B_CHAT, 9.40, 0),
}


def billions(table: NameTable, mtp: bool) -> float:
    return sum(math.prod(t.shape) for name, t in table.targets.items() if name.startswith("mtp.") == mtp) / 1e9


@pytest.mark.parametrize("name", CASES)
def test_every_name_is_used_and_the_counts_are_right(name: str) -> None:
    config, main, mtp = CASES[name]
    spec = model_spec(config)
    table = name_table(config["model_type"], spec)
    shapes = published.shapes(config)
    infos = {key: TensorInfo(shape, published.BF16) for key, shape in shapes.items()}
    check_fit(published.IndexReader(config, infos), table)
    used = table.sources().keys() | table.duplicates.keys() | {"transformer.rotary_pos_emb.inv_freq"}
    assert shapes.keys() <= used
    check_targets(table, parameter_shapes(spec, with_mtp=True))
    assert round(billions(table, mtp=False), 2) == main
    assert round(billions(table, mtp=True), 2) == mtp


def test_v3_as_it_is_published_in_fp8() -> None:
    """Half of the tensors are scales."""
    infos = published.block_scaled(published.shapes(published.V3))
    reader = published.IndexReader(published.V3, infos)
    scheme = read_scheme(published.V3)
    assert scheme is not None
    plain = DequantizedReader(reader, scheme)
    spec = model_spec(plain.config)
    check_fit(plain, name_table("deepseek_v3", spec))
    assert (len(infos), len(plain.tensors)) == (91_991, 46_183)
