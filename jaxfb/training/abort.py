"""The last word where the runtime aborts this process because the coordinator, which process 0 runs, is gone.

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
_kept = []  # the handler, for as long as C may call it


def speak_before_abort(coordinator: str, said: Callable[[], str], code: int) -> None:
    """Prints `said()` and exits with `code` on SIGABRT with nobody listening at the coordinator's address.

    Any other abort goes its way. A handler of Python's would run too late, in the main thread, so this one is C's.
    """
    if os.name != "posix":
        return

    def handler(number: int) -> None:
        libc.alarm(PATIENCE)
        if not is_listening(coordinator, PATIENCE / 2):
            print(said(), file=sys.stderr, flush=True)
            os._exit(code)

    libc = ctypes.CDLL(None)
    _kept[:] = [ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)]
    libc.signal(signal.SIGABRT, _kept[0])


def is_listening(address: str, seconds: float) -> bool:
    """Returns whether somebody accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError:
        return False
    return True
