"""Leaves a run's directory as it was before a command that is refused before its first update.

A run writes its config, its plan and the checkpoint of update 0 before the first update has compiled. Only then it is
known that memory cannot hold it, or that its rows cannot be read.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from jaxfb.training.persistence.run_lock import RunLock
from jaxfb.training.run_dir import RunDirectory

KEPT = 2**24
"""The largest file, in bytes, whose contents are put back: a run overwrites no larger one at its start."""


class Undo(AbstractContextManager["Undo"]):
    """Puts the directory of a run back as it was if a ValueError ends the context; use it as a context manager.

    It does nothing before `begin`, which process 0 calls, and after `forget`.
    """

    def __init__(self, directory: RunDirectory, lock: RunLock):
        self._directory, self._lock = directory, lock
        self._aside: Path | None = None
        self._before: dict[Path, bytes | None] | None = None

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._before is not None and kind is not None and issubclass(kind, ValueError):
            self._back(self._before)

    def begin(self, fresh: bool) -> None:
        """Moves an older run aside where `fresh`, and remembers what else lies there."""
        if fresh and (aside := self._directory.move_aside()):
            self._lock.move_with(aside)
            self._aside = aside
        self._before = {path: _contents(path) for path in self._entries()}

    def forget(self) -> None:
        """Keeps what the run makes from now on, since it has made an update."""
        self._before = None

    def _back(self, before: dict[Path, bytes | None]) -> None:
        """Removes what the run made, puts back what it changed, and moves the older run back to its place."""
        for path in self._entries():
            if path not in before:
                _remove(path)
        for path, contents in before.items():
            if contents is not None and _contents(path) != contents:
                path.write_bytes(contents)
        if self._aside is not None:
            self._lock.release()  # which removes the empty directory
            self._aside.rename(self._directory.path)

    def _entries(self) -> list[Path]:
        """Returns what lies in the directory and among its checkpoints, the latter first."""
        places = self._directory.checkpoints, self._directory.path
        found = [path for place in places if place.is_dir() for path in place.iterdir()]
        return [path for path in found if path != self._lock.path]


def _contents(path: Path) -> bytes | None:
    """Returns what is in a file; None of a directory, a large file and what is not there."""
    return path.read_bytes() if path.is_file() and path.stat().st_size <= KEPT else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
