"""Keeps a run in the working directory that it began in, from which its relative paths start."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress


class WorkingDirectory:
    """The working directory at the start of a run, and the way back if a function of the caller changes it.

    A callback or a reward that executes code in a directory of its own may change it for good. Relative paths, such as
    that of the run's own directory, would then lead elsewhere, and nothing could be saved any more.
    """

    def __init__(self):
        self._path, self._told = _working_directory(), False

    def keep(self, say: Callable[[str], None]) -> None:
        """Changes back to the directory if it was left, and reports that the first time."""
        now = _working_directory()
        if self._path in (None, now):
            return
        with suppress(OSError):  # it is gone: what is written next names the path that is missing
            os.chdir(self._path)
            if not self._told:
                self._told = True
                there = "to a directory that is gone" if now is None else f"to {now}"
                say(
                    f"[run] the working directory was changed {there} while the run was in progress; it is "
                    f"changed back to {self._path}, from which the run's relative paths start"
                )


def _working_directory() -> str | None:
    with suppress(OSError):
        return os.getcwd()
    return None
