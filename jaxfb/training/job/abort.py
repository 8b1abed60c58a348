"""The last word where the runtime aborts this process: the coordinator, which process 0 runs, is gone or ends the job.

jax's distributed client then calls `abort` in its own thread, at once and past all Python:
a stack trace of C++ and exit code 134 is all that a user would see.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable

PATIENCE = 10  # seconds after which the kernel ends the process, should the last word get stuck
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
_kept = []  # the handler, for as long as C may call it
_foreign: dict[int, Callable[[int], None]] = {}  # handlers of C by signal, found once for the process


def report_before_abort(message: Callable[[], str | None], code: int) -> None:
    """Prints `message()` and exits with `code` on SIGABRT; where there is no message the abort goes its way.

    A handler of Python's would run too late, in the main thread, so this one is C's.
    """
    if os.name != "posix":
        return

    def handler(number: int) -> None:
        libc.alarm(PATIENCE)
        if (text := message()) is not None:
            print(text, file=sys.stderr, flush=True)
            os._exit(code)

    libc = ctypes.CDLL(None)
    _kept[:] = [ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)]
    libc.signal(signal.SIGABRT, _kept[0])


def foreign_handler(number: int, ours: Callable) -> Callable[[int], None] | None:
    """Catches a signal with `ours` and returns what C code has caught it with so far, to be called by it; or None.

    Python does not know of handlers of C, such as the one that jax sets to learn of a preemption.
    """
    if os.name != "posix":
        return None
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    before = libc.signal(number, None)
    signal.signal(number, ours)
    pythons = libc.signal(number, None)
    signal.signal(number, ours)
    if before not in (None, 1, pythons):
        _foreign[number] = ctypes.CFUNCTYPE(None, ctypes.c_int)(before)
    return _foreign.get(number)


def is_listening(address: str, seconds: float) -> bool:
    """Returns whether somebody accepts connections at HOST:PORT."""
    return _reaches(address, seconds, lambda connection: True)


def is_answering(address: str, seconds: float) -> bool:
    """Returns whether a gRPC server at HOST:PORT greets; the kernel accepts connections for a stopped process too."""

    def greets(connection: socket.socket) -> bool:
        connection.settimeout(seconds)
        connection.sendall(HTTP2_HELLO)
        return bool(connection.recv(1))

    return _reaches(address, seconds, greets)


def _reaches(address: str, seconds: float, talk: Callable[[socket.socket], bool]) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as connection:
            return talk(connection)
    except OSError:
        return False
