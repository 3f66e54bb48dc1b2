"""The device a kernel is chosen for: a record the caller fills from JAX, given to the registry and to `why_not`."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True)
class Device:
    """platform: JAX's name ("cpu", "gpu"); kind: compute capability of a GPU ("9.0"), empty elsewhere."""

    platform: str
    kind: str = ""

    @property
    def is_sm90(self) -> bool:
        """True on Hopper (H100, H200), the one architecture our native kernels are written for."""
        return self.platform == "gpu" and self.kind == "9.0"

    def __str__(self) -> str:
        return f"{self.platform} {self.kind}".rstrip()


def device_of(device: jax.Device) -> Device:
    """The record of a JAX device."""
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    return Device(platform, str(getattr(device, "compute_capability", "")) if platform == "gpu" else "")
