"""Reads errors of the operating system: which of them a disk explains, and what caused an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

# What a disk, its permissions or a path that is not there refuse: a sentence with the path is enough.
OF_THE_DISK = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "EFBIG",
        "ESTALE",
        "ELOOP",
        "ENAMETOOLONG",
        "ENOENT",
        "EEXIST",
        "ENOTDIR",
        "EISDIR",
        "EMFILE",
        "ENFILE",
    )
    if hasattr(errno, name)
)

FULL = frozenset(getattr(errno, name) for name in ("ENOSPC", "EDQUOT") if hasattr(errno, name))

_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_files(error: BaseException) -> bool:
    """Returns whether too many files are open: by the number of an error, or by the words of XLA, which gives none."""
    if isinstance(error, OSError):
        return error.errno in _TOO_MANY
    return isinstance(error, RuntimeError) and any(os.strerror(number) in str(error) for number in _TOO_MANY)
