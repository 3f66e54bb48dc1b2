"""Which implementation runs an op: takes shapes and a device from a contract, gives back the module that fits.

Selection happens while JAX traces. Imports are late here: an implementation is loaded when it is
first asked about, so that a CPU process never imports the GPU's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import jax

from pallas_kernels.device import Device

AUTO = "auto"

# Op -> implementations in the order in which they are tried, each with the module that holds it. A native kernel comes
# before the form that always fits once its checks have passed on a GPU and it was measured to be faster.
TABLE: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "dense_gemm": (
            ("mosaic_gpu", "pallas_kernels.dense_gemm.mosaic_gpu"),
            ("xla", "pallas_kernels.dense_gemm.xla"),
        ),
        "gqa_decode": (
            ("mosaic_gpu", "pallas_kernels.gqa_decode.mosaic_gpu"),
            ("xla", "pallas_kernels.gqa_decode.xla"),
        ),
        "gqa_prefill": (
            ("mosaic_gpu", "pallas_kernels.gqa_prefill.mosaic_gpu"),
            ("xla", "pallas_kernels.gqa_prefill.xla"),
        ),
        "grouped_gemm": (
            ("mosaic_gpu", "pallas_kernels.grouped_gemm.mosaic_gpu"),
            ("xla", "pallas_kernels.grouped_gemm.xla"),
        ),
        "kv_write": (
            ("mosaic_gpu", "pallas_kernels.kv_write.mosaic_gpu"),
            ("xla", "pallas_kernels.kv_write.xla"),
        ),
        "latent_write": (
            ("mosaic_gpu", "pallas_kernels.latent_write.mosaic_gpu"),
            ("xla", "pallas_kernels.latent_write.xla"),
        ),
        "mla_decode": (
            ("mosaic_gpu", "pallas_kernels.mla_decode.mosaic_gpu"),
            ("xla", "pallas_kernels.mla_decode.xla"),
        ),
        "mla_prefill": (
            ("mosaic_gpu", "pallas_kernels.mla_prefill.mosaic_gpu"),
            ("xla", "pallas_kernels.mla_prefill.xla"),
        ),
        "moe_route": (
            ("mosaic_gpu", "pallas_kernels.moe_route.mosaic_gpu"),
            ("xla", "pallas_kernels.moe_route.xla"),
        ),
        "sampling": (
            ("mosaic_gpu", "pallas_kernels.sampling.mosaic_gpu"),
            ("xla", "pallas_kernels.sampling.xla"),
        ),
    }
)


class KernelChoiceError(ValueError):
    """A named implementation does not exist or does not fit; the text says why and what there is."""


class Implementation(Protocol):
    """What each implementation module offers."""

    def why_not(self, shapes: Any, device: Device) -> str | None:  # noqa: ANN401 - each op has its own shapes record
        """None where it fits, else one sentence: what was given and what is allowed."""

    def run(self, *arrays: jax.Array, **options: Any) -> Any:  # noqa: ANN401
        """The op itself, in the argument order of its contract."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the explain table. reason: None where the implementation fits. chosen: it is the one that runs."""

    op: str
    implementation: str
    reason: str | None
    chosen: bool


def select(op: str, shapes: object, device: Device, implementation: str = AUTO) -> Implementation:
    """The first implementation of `op` that fits, or the named one.

    Args:
      op: a key of TABLE.
      shapes: the op's own record of sizes and dtypes (its contract defines it).
      device: where it will run.
      implementation: "auto", or a name that TABLE gives for the op.

    Raises:
      KernelChoiceError: the name is unknown for this op, the named one does not fit, or none does.
    """
    names = _names(op)
    if implementation != AUTO:
        if implementation not in names:
            raise KernelChoiceError(f"{op} has no implementation {implementation!r}; it has {', '.join(names)}.")
        module = _load(op, implementation)
        reason = module.why_not(shapes, device)
        if reason is not None:
            raise KernelChoiceError(f"{op}: implementation {implementation!r} does not fit: {reason}")
        return module
    reasons = []
    for name in names:
        module = _load(op, name)
        reason = module.why_not(shapes, device)
        if reason is None:
            return module
        reasons.append(f"{name}: {reason}")
    raise KernelChoiceError(f"{op}: no implementation fits. " + " ".join(reasons))


def explain(shapes_by_op: Mapping[str, object], device: Device, implementation: str = AUTO) -> tuple[Row, ...]:
    """The whole table for some ops: every implementation, why it does not fit, and which one runs.

    A forced implementation that an op lacks or that does not fit leaves that op without a chosen row.
    """
    rows = []
    for op, shapes in shapes_by_op.items():
        taken = False
        for name in _names(op):
            reason = _load(op, name).why_not(shapes, device)
            chosen = not taken and reason is None and implementation in (AUTO, name)
            taken |= chosen
            rows.append(Row(op, name, reason, chosen))
    return tuple(rows)


def _names(op: str) -> tuple[str, ...]:
    if op not in TABLE:
        raise KernelChoiceError(f"there is no op {op!r}; there are {', '.join(TABLE)}.")
    return tuple(name for name, _ in TABLE[op])


def _load(op: str, implementation: str) -> Implementation:
    return importlib.import_module(dict(TABLE[op])[implementation])
