"""The device a kernel is chosen for: a record the caller fills from JAX, given to the registry and to `why_not`."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True)
class Device:
    """platform: JAX's name ("cpu", "gpu"); kind: compute capability of a GPU ("9.0"), empty elsewhere.

    sms: multiprocessors of a GPU, by default those of an H100 SXM or H200; others of the kind have fewer (H100 PCIe
    114). Kernels whose CTAs wait for each other need all of them to run at once.
    """

    platform: str
    kind: str = ""
    sms: int = 132

    @property
    def is_sm90(self) -> bool:
        """True on Hopper (H100, H200), the one architecture our native kernels are written for."""
        return self.platform == "gpu" and self.kind == "9.0"

    def __str__(self) -> str:
        return f"{self.platform} {self.kind}".rstrip()


def device_of(device: jax.Device) -> Device:
    """The record of a JAX device."""
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    if platform != "gpu":
        return Device(platform)
    return Device(platform, str(getattr(device, "compute_capability", "")), int(getattr(device, "core_count", 0)))
