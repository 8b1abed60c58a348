"""Names and finds the directories of a run's checkpoints, and removes those of saves that were never committed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from etils import epath

log = logging.getLogger(__name__)

DAMAGED_SUFFIX = ".damaged"
REMOVALS, PAUSE = 50, 0.1  # attempts, and seconds between them
UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"  # Orbax renames the directory once everything in it is written


def step_of(path: Path | epath.Path) -> int | None:
    """Returns the step whose checkpoint lies at `path`, by its name alone; None for any other file or directory."""
    name = path.name
    is_number = name.isascii() and name.isdecimal() and name == str(int(name))
    return int(name) if is_number and path.is_dir() else None


def steps_in(directory: epath.Path) -> list[int]:
    """Returns the steps that have a directory, oldest first, whether they can be read or not."""
    if not directory.is_dir():
        return []
    return sorted(step for step in map(step_of, directory.iterdir()) if step is not None)


def remove_unfinished(directory: epath.Path) -> None:
    """Removes the directories of saves that were never committed; one that stays is a warning."""
    paths = directory.iterdir() if directory.is_dir() else ()
    for path in [path for path in paths if path.name.endswith(UNFINISHED_SUFFIX) and path.is_dir()]:
        try:
            _remove(path)
        except OSError as error:
            log.warning("[checkpoint] %s, left by a save that failed, cannot be removed: %s", path, error)


def _remove(path: epath.Path) -> None:
    """Removes a directory into which the threads of a save that failed may go on writing for a moment."""
    for left in reversed(range(REMOVALS)):
        try:
            return path.rmtree(missing_ok=True)
        except OSError:
            if not left:
                raise
            time.sleep(PAUSE)


def unused(path: epath.Path) -> epath.Path:
    """Returns `path`, or `path` with the first number behind it that no file has."""
    number, candidate = 1, path
    while candidate.exists():
        number, candidate = number + 1, path.with_name(f"{path.name}{number}")
    return candidate
