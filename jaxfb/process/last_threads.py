"""Names the threads that keep a process alive after its command: Python waits for them without limit or a word."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

PATIENCE = 10.0  # seconds in which threads may end before they are named


def name_last_threads(code: int, limit: float | None) -> None:
    """Prints for which threads Python waits, where the process has not ended a while after this call at its end.

    Such threads are started by a writer, a callback or a data source.

    code: the exit code of the command. limit: seconds after which the process is ended; None: never.
    """
    rest = "" if limit is None else f", or it is ended after {limit:g} s (hosts.stuck_after)"

    def watch() -> None:
        time.sleep(PATIENCE)
        text = f"{_waiting()}{rest}"
        with contextlib.suppress(RuntimeError):  # some versions of Python start no thread so late
            threading.Thread(target=_print, args=(text,), daemon=True).start()
        if limit is not None:
            time.sleep(limit)
            os._exit(code)

    with contextlib.suppress(RuntimeError):  # not one thread more is allowed
        threading.Thread(target=watch, name="jaxfb last threads", daemon=True).start()


def _waiting() -> str:
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    names = ", ".join(repr(thread.name) for thread in threads if thread is not threading.main_thread())
    of_threads = f", since these of its threads have not: {names}" if names else ""
    return f"jaxfb: the command is done, but its process has not ended{of_threads}; SIGTERM ends it"


def _print(text: str) -> None:
    """Prints to standard error; in a thread, since nobody may read it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
