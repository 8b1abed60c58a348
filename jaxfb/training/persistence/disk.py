"""The space and the inodes on the disk of a run, compared with what its checkpoints take, before the first update."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxfb.checkpoint.step_directories import remove_unfinished, step_of

FILES, FILES_OF_A_PROCESS = 20, 5  # of one checkpoint, directories included


def bytes_of(state: Any) -> int:
    """Returns the bytes of all arrays of a state, each counted once however many devices keep it."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(state))


def lack_of_space(checkpoints: Path, needed: int, keep: int, say: Callable[[str], None]) -> str | None:
    """Returns a sentence where a disk has no space, or no inodes, for one checkpoint, else None.

    Prints a line where there is space for one, but not for all that are kept. What a killed save has left there is
    removed first.

    Args:
      checkpoints: the directory they go to, which may be missing. needed: bytes of one. keep: how many are kept, beside
        the one that is being written.
    """
    remove_unfinished(epath.Path(checkpoints))
    free, where, inodes = free_space(checkpoints), checkpoints.parent, free_inodes(checkpoints)
    files = FILES + FILES_OF_A_PROCESS * jax.process_count()
    if inodes is not None and inodes < files:
        return (
            f"[checkpoint] one checkpoint takes up to {files} files, but the disk of {where} has inodes for {inodes} "
            "more; remove files, or choose another run.dir"
        )
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
    try:
        usage = shutil.disk_usage(_existing(path))
    except OSError:
        return None
    return usage.free if usage.total else None  # some network file systems tell nothing


def free_inodes(path: Path) -> int | None:
    """Returns how many files can still be made where a path is or would be; None where the system sets no limit."""
    try:
        found = os.statvfs(_existing(path))
    except OSError:
        return None
    return found.f_favail if found.f_files else None


def _existing(path: Path) -> Path:
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path("."))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
