"""The space on the disk of a run, compared with what its checkpoints take before the first update is computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxfb.step_directories import step_of


def bytes_of(state: Any) -> int:
    """Returns the bytes of all arrays of a state, each counted once however many devices keep it."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))


def lack_of_space(checkpoints: Path, needed: int, keep: int, say: Callable[[str], None]) -> str | None:
    """Returns a sentence where a disk has no space for one checkpoint, else None.

    Prints a line where there is space for one, but not for all that are kept.

    Args:
      checkpoints: the directory they go to, which may be missing. needed: bytes of one. keep: how many are kept, beside
        the one that is being written.
    """
    free, where = free_space(checkpoints), checkpoints.parent
    if free is None:
        return None
    if needed > free:
        return (
            f"[checkpoint] one checkpoint takes {_mb(needed)}, but the disk of {where} has {_mb(free)} free; free "
            "some space, or choose another run.dir"
        )
    found = checkpoints.iterdir() if checkpoints.exists() else ()
    more = max(keep + 1 - sum(step_of(path) is not None for path in found), 1)
    if more * needed > free:
        say(
            f"checkpoint.keep={keep}: {more} more checkpoints of {_mb(needed)} are to come, but the disk of {where} "
            f"has {_mb(free)} free; free some space, or keep fewer"
        )
    return None


def free_space(path: Path) -> int | None:
    """Returns the free bytes on the disk where a path is or would be; None where the system does not tell."""
    there = next((parent for parent in (path, *path.parents) if parent.exists()), Path("."))
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network file systems tell nothing


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
