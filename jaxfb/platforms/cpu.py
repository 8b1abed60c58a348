"""Keeps the collectives of simulated CPU devices from mixing up.

XLA:CPU runs what does not depend on each other at the same time, collectives of one device too. It starts them in the
order of the program, but does not wait for the end of a loop or branch with collectives in it before it starts the
next collective; in a program from the compilation cache, loops and branches have no order at all among themselves and
with what is around them. Devices find each other by (channel, group of devices), and JAX gives every collective
channel 1. So one device's all-gather can meet another's reduce-scatter: wrong numbers, an abort or a hang. Seen on
jax 0.10.2.

Three remedies. Every collective gets its own channel (`compat.mend_cpu_collectives`); that alone keeps numbers
right, and holds for every program that is lowered after jaxfb was imported. XLA's schedule that uses little memory
orders nearly all collectives by the buffers that they share. And there are threads for all that may wait at once.

What they leave: in a program from the compilation cache, one of two devices may enter a loop with a collective in it
and the other a collective beside that loop, each with the other's behind it in its queue, so that both wait for ever.
Seen once in a hundred runs of a program with such a pair, never in a fresh program. So `use_compile_cache` keeps no
programs of a process with several CPU devices.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

SCHEDULER = "xla_cpu_enable_concurrency_optimized_scheduler"
IN_ORDER = {SCHEDULER: False}
_WORKERS = 4  # threads that XLA:CPU lends to one device's program, each of which may wait in a collective
_TESTED = (0, 13)  # a flag that XLA does not know ends the process, so newer jaxlibs are not given this one
_NO_OLD_EMITTER = (0, 11)  # nor these the flag for it: 0.10 has it, 0.12 does not


def prepare() -> None:
    """Sets XLA's flag and number of threads where several CPU devices are asked for and XLA has not started yet.

    A value that the environment already sets is kept.
    """
    number = _num_devices()
    if number < 2 or _has_started():
        return
    if SCHEDULER not in (flags := os.environ.get("XLA_FLAGS", "")) and _knows_scheduler():
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER}=false".strip()
    if "PJRT_NPROC" not in os.environ and "NPROC" not in os.environ:
        os.environ["PJRT_NPROC"] = str(_WORKERS * number + (os.cpu_count() or 1))


def quickly_compiled() -> dict[str, int | str]:
    """Returns flags of XLA for programs that run once or twice: compiled in a third of the time, and slow.

    The kernels of fusions come from XLA's older emitter where it can still be asked for; it computes the same.
    """
    flags: dict[str, int | str] = {"--xla_backend_optimization_level": 0}
    if _version() < _NO_OLD_EMITTER:
        flags["--xla_cpu_use_fusion_emitters"] = "false"
    return flags


def wants_options(mesh: Mesh) -> bool:
    """Returns whether to compile a program over this mesh with the compiler options `IN_ORDER`.

    That is the flag again, for a process where XLA started without it. JAX takes compiler options for the outermost
    jit alone and refuses them inside of another.
    """
    if mesh.size < 2 or SCHEDULER in os.environ.get("XLA_FLAGS", "") or not _knows_scheduler():
        return False
    from jaxfb.platforms.compat import is_tracing

    device = mesh.abstract_mesh.abstract_device
    return device is not None and device.platform == "cpu" and not is_tracing()


def _num_devices() -> int:
    """Returns how many CPU devices XLA_FLAGS or jax.config ask for."""
    asked = re.findall(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked.append(os.environ.get("JAX_NUM_CPU_DEVICES", "1"))
    if "jax" in sys.modules:
        asked.append(getattr(sys.modules["jax"].config, "jax_num_cpu_devices", 1))
    return max(int(number) for number in asked)


def _has_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jaxfb.platforms.compat import backends_are_made

    return backends_are_made()


def _knows_scheduler() -> bool:
    return _version() < _TESTED


@cache
def _version() -> tuple[int, ...]:
    """Returns jaxlib's version, without what comes after the second number."""
    from importlib import metadata  # not loaded by every `import jaxfb`

    return tuple(map(int, re.findall(r"\d+", metadata.version("jaxlib"))[:2]))
