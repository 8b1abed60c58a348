"""Puts into one sentence why a save failed, and which steps are complete."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from etils import epath

from jaxfb.checkpoint.obstacles import number_of
from jaxfb.process.os_errors import chain
from jaxfb.refusal import StorageError

GONE = "the directory is not there any more, as where it was removed or renamed during the run"


class CannotWrite(StorageError):
    """Something of a run could not be written (disk full, no permission); one sentence that names what is saved."""


def cannot_write(
    directory: epath.Path, step: int | None, steps: Sequence[int] | None, error: BaseException
) -> CannotWrite:
    """Returns the error to raise for a save that failed.

    steps: those that are complete; None where that cannot be read.
    """
    have = "not known" if steps is None else ", ".join(map(str, steps)) or "none"
    what, reason = f"step {step} could not be written to {directory}", _reason(directory, error)
    if steps is not None and step in steps:
        what = f"step {step} is complete in {directory}, but not what follows, such as to remove an older one"
        reason += _file_of(error)
    return CannotWrite(f"[checkpoint] {what}: {reason}; complete steps: {have}")


def why_not_named(directory: epath.Path) -> str:
    """Returns why a save that has ended without an error has left no checkpoint."""
    return GONE if _is_gone(directory) else "its files were removed meanwhile, or the save was cancelled"


def _is_gone(directory: epath.Path) -> bool:
    """Returns whether a directory is known not to be there."""
    with contextlib.suppress(OSError):
        return not directory.exists()
    return False


def _reason(directory: epath.Path, error: BaseException) -> str:
    """Returns the system's words, if its error is in the chain of causes; otherwise the first line of the error."""
    if isinstance(error, StorageError):  # one of ours, which is a sentence
        return str(error)
    number = next(filter(None, map(number_of, chain(error))), None)
    if number == errno.ENOENT and _is_gone(directory):
        return GONE
    if number is not None:
        return os.strerror(number)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def _file_of(error: BaseException) -> str:
    """Returns ": " and the file that an error in the chain of causes names, or nothing."""
    files = (getattr(one, "filename", None) for one in chain(error))
    return next((f": {file}" for file in files if file), "")
