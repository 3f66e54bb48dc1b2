"""The registry: written order, reasons, and forced choices that fail with a sentence."""

from __future__ import annotations

import importlib

import jax
import pytest

from pallas_kernels import registry
from pallas_kernels.device import Device, device_of
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.kv_write.contract import KvWriteShapes
from pallas_kernels.rotary import Rotary

CPU, H200 = Device("cpu"), Device("gpu", "9.0")
SHAPES = GqaDecodeShapes(rows=8, kv_heads=2, group=16, head_dim=128, page_tokens=64, max_pages=8, dtype="bfloat16")
_WRITE = {"rows": 8, "kv_heads": 2, "group": 16, "head_dim": 128, "page_tokens": 64, "rotary": Rotary(64)}
WRITE = KvWriteShapes(**_WRITE, bias=False, norm=False, dtype="bfloat16")


def test_every_entry_loads_and_has_both_functions() -> None:
    for op, entries in registry.TABLE.items():
        assert "xla" in dict(entries), f"{op} lacks the implementation that always fits"
        for _, module_name in entries:
            module = importlib.import_module(module_name)
            assert callable(module.why_not) and callable(module.run)


def test_a_forced_choice_that_does_not_fit_says_why() -> None:
    with pytest.raises(registry.KernelChoiceError, match=r"'mosaic_gpu' does not fit: .* 9\.0, this is cpu"):
        registry.select("gqa_decode", SHAPES, CPU, "mosaic_gpu")
    assert registry.select("gqa_decode", SHAPES, H200, "mosaic_gpu").__name__.endswith("mosaic_gpu")


def test_auto_takes_the_first_that_fits() -> None:
    assert registry.select("gqa_decode", SHAPES, CPU).__name__ == "pallas_kernels.gqa_decode.xla"


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(registry.KernelChoiceError, match=r"kv_write has no implementation 'triton'; it has .*xla"):
        registry.select("kv_write", WRITE, CPU, "triton")
    with pytest.raises(registry.KernelChoiceError, match=r"no op 'softmax'; there are dense_gemm"):
        registry.select("softmax", None, CPU)


def test_explain_gives_a_row_for_each_implementation() -> None:
    rows = registry.explain({"gqa_decode": SHAPES, "kv_write": WRITE}, CPU)
    assert [(row.op, row.implementation) for row in rows] == [
        (op, name) for op in ("gqa_decode", "kv_write") for name, _ in registry.TABLE[op]
    ]
    assert [row.op for row in rows if row.chosen] == ["gqa_decode", "kv_write"]
    assert all(row.reason is None for row in rows if row.implementation == "xla")


def test_explain_of_a_choice_that_an_op_lacks_marks_nothing() -> None:
    assert not any(row.chosen for row in registry.explain({"kv_write": WRITE}, H200, "nothing"))


def test_device_of_a_jax_device() -> None:
    assert device_of(jax.devices("cpu")[0]) == Device("cpu", "")
    assert H200.is_sm90 and not CPU.is_sm90 and str(H200) == "gpu 9.0"
