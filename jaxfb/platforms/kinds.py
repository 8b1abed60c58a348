"""Names the kinds of device that choices depend on: TPUs as `device_kind` has them, GPUs by what they can compute."""

from __future__ import annotations

import jax

V5E, V6E = "TPU v5 lite", "TPU v6 lite"
V5P = ("TPU v5", "TPU v5p")
"""Both names of v5p."""


def compute_capability() -> float:
    """Returns that of this process's GPU, such as 9.0 for Hopper; 0 where the device is not made by NVIDIA."""
    try:
        return float(jax.local_devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0
