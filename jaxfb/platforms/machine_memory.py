"""Reads how much memory this machine has, and how much of it is free."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def host_memory() -> int | None:
    """Returns the bytes that this process may use, of the machine or of its container; None where that is unknown."""
    found = []
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(ValueError, OSError):
        found.append(int((CGROUP / "memory.max").read_text()))
    return min(found, default=None)


def free_memory() -> int | None:
    """Returns the bytes of this machine, or of its container, that nobody uses, what can be given up at once counted;
    None where that is unknown.
    """
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(1024 * _numbers(MEMINFO)["MemAvailable:"])
    with suppress(OSError, ValueError, KeyError):
        most, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        found.append(max(0, most - used + _numbers(CGROUP / "memory.stat")["inactive_file"]))
    return min(found, default=None)


def free_swap() -> int:
    """Returns the bytes that can be moved out of memory; 0 where that is unknown."""
    with suppress(OSError, ValueError, KeyError):
        return 1024 * _numbers(MEMINFO)["SwapFree:"]
    return 0


def _numbers(path: Path) -> dict[str, int]:
    """Returns name -> number of a file of the kernel that has such a pair in each line."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {one[0]: int(one[1]) for one in words if len(one) > 1}
