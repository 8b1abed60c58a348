"""Keeps a process going whose output nobody takes: a reader that has ended, a closed terminal, a full disk."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def open_closed() -> None:
    """Opens the null device in place of each standard stream that the shell has closed (`>&-`).

    A file of the run would get its number otherwise, and in it what libraries print from C.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None and not _is_open(number):
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, the lowest free number is this one
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _is_open(number: int) -> bool:
    with suppress(OSError):
        os.fstat(number)
        return True
    return False


class WhileTaken:
    """Passes text on to a stream as long as it can be written; later text is dropped, and no error is raised.

    stream: None where the shell has closed it (`>&-`). report: whether standard error gets a line about it, once.
    """

    def __init__(self, stream: Any, report: bool = True):
        self._stream, self._report = stream, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Returns whether the text goes to a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Writes the text, or drops it."""
        self._passing_on(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes what was written."""
        self._passing_on(lambda: self._stream.flush())

    def _passing_on(self, do: Callable[[], Any]) -> None:
        if self._stream is None:
            return
        try:
            do()
        except OSError as error:
            # also what is still buffered: flushed at the end it would change the exit code of the process
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._report:
                with suppress(OSError):
                    print(f"jaxfb: {_why(error)}; training continues without it", file=sys.stderr, flush=True)


def _why(error: OSError) -> str:
    if error.errno in (errno.EPIPE, errno.EIO):
        return "nobody reads the output any more"
    return f"the output cannot be written ({error.strerror or error})"
