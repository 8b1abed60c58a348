"""Looks at files that are mapped into memory before they are read: one that was cut short would end the process.

Part of the data (token files, which others may write to). Reading a page behind the end of a mapped file is a SIGBUS,
which no Python can catch.
"""

from __future__ import annotations

import logging
import os

import numpy as np

from jaxfb.refusal import Refused

log = logging.getLogger(__name__)


class MappedFile:
    """A file that an array is mapped from, as it was when the array was made."""

    def __init__(self, array: np.memmap):
        self._path = str(array.filename)
        self._end = array.offset + array.nbytes
        self._identity, self._content = _stamps(os.stat(self._path))
        self._warned = False

    def check(self) -> None:
        """Warns, once, where the file has been written to since it was opened.

        Raises:
          ValueError: it is shorter than the array.
        """
        try:
            status = os.stat(self._path)
        except OSError:  # moved or removed: what is mapped stays as it was
            return
        identity, content = _stamps(status)
        if identity != self._identity:  # replaced by another file, likewise
            return
        if status.st_size < self._end:
            raise Refused(
                f"[data] {self._path} was cut to {status.st_size} bytes while it was read, it had {self._end}; put the "
                "whole file back"
            )
        if content != self._content and not self._warned:
            self._warned = True
            log.warning(
                "[data] %s was written to while it is read; if its tokens are others now, so are the rows that follow, "
                "and a resumed run refuses them: write changed tokens to a new file",
                self._path,
            )


def mapped_file(array: np.ndarray) -> MappedFile | None:
    """Returns the file behind an array; None for an array in memory."""
    return MappedFile(array) if isinstance(array, np.memmap) and array.filename else None


def _stamps(status: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns which file it is, and what changes when it is written to."""
    return (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)
