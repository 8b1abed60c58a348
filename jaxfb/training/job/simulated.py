"""Simulated CPU devices: what to ask for before jax is imported."""

import os
from collections.abc import Mapping
from math import prod

from jaxfb.platforms import cpu

NUM_DEVICES = 8


def simulate_devices(mesh: Mapping[str, int]) -> None:
    """Makes this process compute in float64 on enough simulated CPU devices for a mesh, and compile quickly.

    What the environment already sets is kept: JAX_PLATFORMS=cuda checks on real devices.
    """
    needed = prod(size for size in mesh.values() if size > 0)
    flags = os.environ.get("XLA_FLAGS", "")
    asked = {"--xla_force_host_platform_device_count": needed * -(-NUM_DEVICES // needed)}
    for name, value in (asked | cpu.quickly_compiled()).items():
        flags += "" if name in flags else f" {name}={value}"
    os.environ["XLA_FLAGS"] = flags
    cpu.prepare()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_ENABLE_X64", "1")


def without_devices() -> None:
    """Keeps JAX from looking for accelerators in a process that computes nothing."""
    os.environ["JAX_PLATFORMS"] = "cpu"
