"""Lets XLA use as much pinned memory for GPUs as the host has.

Optimizer states and layers' inputs on the host lie in pinned memory, and so does the copy of a state from which a
checkpoint is written. XLA refuses more than 64 GiB of it for one GPU, however much the machine has.
"""

from __future__ import annotations

import os

from jaxfb.platforms.machine_memory import host_memory

LIMIT, RESERVED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
XLAS_LIMIT = 64  # GiB, as all numbers here
_ALLOCATOR = "xla_gpu_host_bfc"


def prepare() -> None:
    """Raises XLA's limit to the memory of this machine or its container, where that is more.

    XLA reads it when it starts, and takes memory as it is needed. A limit that the environment sets is kept, and so is
    XLA's own where the environment has it reserve all of its pinned memory at the start.
    """
    memory = (host_memory() or 0) // 2**30
    is_reserved = os.environ.get(RESERVED, "").lower() in ("1", "true")
    if memory > XLAS_LIMIT and not is_reserved:
        os.environ.setdefault(LIMIT, str(memory))


def limit() -> int:
    """Returns the GiB of pinned memory that XLA gives the programs of one GPU."""
    number = os.environ.get(LIMIT, "")
    return int(number) if number.isdecimal() else XLAS_LIMIT


def is_exhausted(error: BaseException | None) -> bool:
    """Returns whether XLA's error is about the pinned memory of the host, not that of a GPU."""
    return any(name in str(error) for name in (_ALLOCATOR, LIMIT))
