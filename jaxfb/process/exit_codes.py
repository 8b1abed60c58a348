"""Exit codes of the command line: what a supervisor or a script decides by. README.md lists them."""

from __future__ import annotations

from jaxfb.process.os_errors import OF_THE_DISK
from jaxfb.refusal import Refused, StorageError

DONE = 0
FAILED = 1
"""A check found a difference, a plan does not fit, or a bug ended the process."""
REFUSED = 2
UNWRITTEN = 74
"""Something could not be written or read, as on a full disk."""
RESUMABLE = 75
"""Stopped by a signal; what there is to continue from is saved."""
LOST = 76
"""Another process of the job was lost, or this one hung; started again, it continues."""
GAVE_UP = 78
"""Updates stayed non-finite, or spikes kept coming."""
FAULTY = 79
"""A device computes wrongly."""


def code_of(error: BaseException) -> int:
    """Returns the exit code that an error ends a command with, as far as its type tells."""
    if isinstance(error, Refused):
        return REFUSED
    if isinstance(error, StorageError):
        return UNWRITTEN
    return UNWRITTEN if isinstance(error, OSError) and error.errno in OF_THE_DISK else FAILED
