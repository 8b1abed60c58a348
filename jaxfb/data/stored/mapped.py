"""Reads pieces of a file that an array is mapped from, by system calls: one that was cut short is then an error.

Part of the data (token files, which others may write to, and the index of their rows). Reading a page of the mapping
that is behind the end of the file, or that the disk or the server does not give, is a SIGBUS, which Python cannot
catch.
"""

from __future__ import annotations

import logging
import os
from itertools import repeat

import numpy as np

from jaxfb.refusal import Refused

log = logging.getLogger(__name__)


class MappedFile:
    """A file that an array is mapped from, as it was when the array was made."""

    def __init__(self, array: np.memmap):
        self._array, self._path = array, str(array.filename)
        self._end = array.offset + array.nbytes
        self._identity, self._content = _stamps(os.stat(self._path))
        self._warned = False

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Returns the elements at i64[n] positions; warns, once, where the file has been written to since then.

        Raises:
          ValueError: it is shorter than the array.
        """
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # moved or removed: what is mapped stays as it was
            return self._array[positions]
        try:
            status = os.fstat(file)
            identity, content = _stamps(status)
            if identity != self._identity:  # replaced by another file, likewise
                return self._array[positions]
            if status.st_size < self._end:
                raise self._cut(status.st_size)
            self._warn_of(content)
            return self._pieces(file, positions)
        finally:
            os.close(file)

    def _pieces(self, file: int, positions: np.ndarray) -> np.ndarray:
        """Returns the elements at positions, of which neighbours that follow each other are read at once."""
        size, offset = self._array.itemsize, self._array.offset
        edges = np.flatnonzero(positions[1:] != positions[:-1] + 1) + 1
        starts = np.concatenate([[0], edges])
        lengths = np.diff(starts, append=len(positions)) * size
        places = positions[starts] * size + offset
        try:
            found = b"".join(map(os.pread, repeat(file), lengths.tolist(), places.tolist()))
        except OSError as error:  # of a disk or a server
            raise Refused(f"[data] {self._path} cannot be read: {error.strerror}; check its disk") from error
        if len(found) != len(positions) * size:
            raise self._cut(os.fstat(file).st_size)
        return np.frombuffer(found, self._array.dtype)

    def _cut(self, size: int) -> Refused:
        return Refused(
            f"[data] {self._path} was cut from {self._end} to {size} bytes while it was read; put the whole file "
            "back"
        )

    def _warn_of(self, content: tuple[int, int]) -> None:
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
