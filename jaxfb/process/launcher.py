"""Connects the processes of a job with the `jaxfb launch` that started them, which may end before they do.

A process reports that its run has begun: only then another start may continue what lies in its directory. The launcher
writes nothing; that its end of the connection closes is how a process notices that it is gone, kill -9 included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from jaxfb.process.signals import HANGUP, caught_here

VARIABLE = "JAXFB_LAUNCHER"
"""Of the environment: the number of the file descriptor at which the launcher can be reached."""


class Connection:
    """Connects the launcher with processes that it starts with this `environment` and the file descriptors `passed`."""

    def __init__(self):
        self._end, self._others_end = socket.socketpair()
        self._end.setblocking(False)
        self.passed = (self._others_end.fileno(),)
        self.environment = {VARIABLE: str(self.passed[0])}

    def has_begun(self) -> bool:
        """Returns whether a process has reported since the last call that the run has begun."""
        with contextlib.suppress(BlockingIOError):
            return bool(self._end.recv(4096))
        return False

    def close(self) -> None:
        """Gives both ends up."""
        self._end.close()
        self._others_end.close()


def tell_begun() -> None:
    """Reports to the launcher, if there is one, that the run has begun, so that its directory holds no older one."""
    if (number := _descriptor()) is not None:
        with contextlib.suppress(OSError):
            os.write(number, b"\0")


def end_with_launcher() -> None:
    """Ends this process as a closed terminal does, once the launcher that started it is gone; nothing without one."""
    if (number := _descriptor()) is not None:
        threading.Thread(target=_wait, args=(number, _hang_up), name="jaxfb launcher", daemon=True).start()


def _descriptor() -> int | None:
    """Returns the file descriptor of the process's end of the connection; None where nobody has launched it."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() else None


def _wait(number: int, then: Callable[[], Any]) -> None:
    try:
        while os.read(number, 1):
            pass
    except ConnectionResetError:  # the launcher ended before it had read the report of this process
        pass
    except OSError:  # no such file: it was not passed on to this process
        return
    then()


def _hang_up() -> None:
    with contextlib.suppress(OSError):
        print("jaxfb: [launch] the launcher is gone; this process ends as well", file=sys.stderr, flush=True)
    os.kill(os.getpid(), next((number for number in caught_here() if number == HANGUP), signal.SIGTERM))
