"""Kernels by class: names that profiles on an H200 hold, every op of ours, and that no time is lost."""

from __future__ import annotations

import pytest

from scripts import _kernel_classes as classes
from scripts._commit import ROOT

OPS = sorted(path.parent.name for path in (ROOT / "pallas_kernels").glob("*/contract.py"))
OF_OPS = {
    "gqa_decode": "attention",
    "gqa_prefill": "attention",
    "mla_decode": "attention",
    "mla_prefill": "attention",
    "dense_gemm": "dense GEMM",
    "grouped_gemm": "MoE GEMM",
    "moe_route": "routing",
    "kv_write": "cache write",
    "latent_write": "cache write",
    "sampling": "sampling",
}


@pytest.mark.parametrize(
    ("kernel", "title"),
    [
        ("mla_decode_few_heads_mosaic_gpu_kernel", "attention"),
        ("mla_prefill_expand_mosaic_gpu_kernel", "attention"),
        ("grouped_gemm_mosaic_gpu_kernel", "MoE GEMM"),
        ("dense_gemm_mosaic_gpu_kernel", "dense GEMM"),
        ("sampling_chunks_mosaic_gpu_kernel", "sampling"),
        ("gemm_fusion_dot_general_431", "dense GEMM"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "dense GEMM"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "dense GEMM"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("all-gather-start.3", "collectives"),
        ("fusion_891", "norm, elementwise, copies"),
        ("loop_add_broadcast_convert_divide_multiply_or_reduce_window_fusion", "norm, elementwise, copies"),
        ("input_scatter_fusion_2", "norm, elementwise, copies"),
        ("MemcpyD2D", "norm, elementwise, copies"),
        ("sort_7", "other"),
        ("a_kernel_of_tomorrow", "other"),
    ],
)
def test_names_have_their_class(kernel: str, title: str) -> None:
    assert classes.class_of(kernel) == title


@pytest.mark.parametrize("op", OPS)
def test_every_op_of_ours_has_its_class(op: str) -> None:
    """A new op must be given a class here and in the table, or its time would stand under another's name."""
    assert classes.class_of(f"{op}_mosaic_gpu_kernel") == OF_OPS[op]


def test_no_time_is_dropped() -> None:
    """What the table does not know and what was not listed are other; the host's gap is the rest of the step."""
    kernels = {
        "all": (1000.0, 9),
        "(between kernels)": (300.0, 0),
        "grouped_gemm_mosaic_gpu_kernel": (400.0, 2),
        "gemm_fusion_dot_1": (100.0, 3),
        "gemm_fusion_dot_2": (150.0, 1),
        "strange": (20.0, 1),
    }
    step = classes.split_step(16, 760.0, kernels)
    assert {title: (part.us, part.launches) for title, part in step.parts.items()} == {
        "MoE GEMM": (400.0, 2),
        "dense GEMM": (250.0, 4),
        "other": (pytest.approx(50.0), 3),
        "host gap": (pytest.approx(60.0), 0),
    }
    assert sum(part.us for part in step.parts.values()) == pytest.approx(step.step_us)
    assert step.parts["dense GEMM"].kernels == (("gemm_fusion_dot_2", 150.0), ("gemm_fusion_dot_1", 100.0))
    assert [name for name, _ in step.parts["other"].kernels] == ["(not listed)", "strange"]


def test_kernels_that_take_longer_than_the_step_leave_no_gap() -> None:
    """A profile runs without graphs and may be slower; the kernels stay as they were measured."""
    step = classes.split_step(1, 90.0, {"all": (100.0, 1), "nvjet": (100.0, 1)})
    assert step.parts["host gap"].us == 0 and step.kernels_us == 100.0
