"""Tells what keeps a process from reading a checkpoint, such as a permission, from damage of the checkpoint's files.

A step that is passed over as damaged is set aside, and its run continues from an older one. That would lose work where
the files are whole and the process may not read them, or has too many others open.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from etils import epath

from jaxfb.process.os_errors import chain
from jaxfb.refusal import StorageError

_NAMES = "EACCES EPERM EMFILE ENFILE ENOMEM ESTALE ETIMEDOUT ENOTCONN EHOSTDOWN EHOSTUNREACH"
OBSTACLES = frozenset(getattr(errno, name) for name in _NAMES.split() if hasattr(errno, name))
_OF_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")


class Unreadable(StorageError):
    """A checkpoint that cannot be read now, of which no damage is known; the message is a whole sentence."""


def number_of(error: BaseException) -> int | None:
    """Returns the system's number of an error, also of one in tensorstore's words; None where it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _OF_TENSORSTORE.search(str(error))
    return int(found[1]) if found else None


def unreadable(checkpoint: epath.Path, error: BaseException) -> Unreadable | None:
    """Returns the sentence for a step whose reading was prevented, None where its files may be damaged."""
    reason = next(_denied(checkpoint), None) or _reason(error)
    if reason is None:
        return None
    return Unreadable(
        f"[checkpoint] step {checkpoint.name} of {checkpoint.parent} cannot be read, though nothing is known to be "
        f"wrong with it: {reason}; correct that and start again, no step was removed"
    )


def _reason(error: BaseException) -> str | None:
    """Returns the first cause that is an obstacle, with its file where it names one."""
    for one in chain(error):
        number = number_of(one)
        if number is not None and number in OBSTACLES:
            path = getattr(one, "filename", None)
            return f"{os.strerror(number)}{f': {path}' if path else ''}"
    return None


def _denied(checkpoint: epath.Path) -> Iterator[str]:
    """Yields what may not be read in a checkpoint: libraries take what they may not look into for missing."""
    denied: list[OSError] = []
    for folder, _, files in os.walk(checkpoint, onerror=denied.append):
        paths = [folder, *(os.path.join(folder, name) for name in files)]
        denied += [PermissionError(errno.EACCES, "", path) for path in paths if _is_forbidden(path)]
    for error in denied:
        if error.errno is not None and error.errno in OBSTACLES:
            yield f"{os.strerror(error.errno)}: {error.filename}"


def _is_forbidden(path: str) -> bool:
    """Returns whether this process may not read what is there, or not look into it."""
    wanted = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return os.path.lexists(path) and not os.access(path, wanted)
