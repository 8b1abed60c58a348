"""Ends the threads that a failed save leaves behind: some wait for signals of others that have failed.

They would wait for as long as one save may take, and Python waits for them when it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

try:
    from orbax.checkpoint._src.futures import future

    _WAITING: Any = future._SignalingThread
except (ImportError, AttributeError):  # private names of Orbax; without them its threads are left alone
    _WAITING = ()

LOOK = 0.2  # seconds between two looks


def end_threads_since(before: Iterable[threading.Thread]) -> None:
    """Ends the waiting threads of a save that has failed, and returns at once.

    Threads that still write may start others, so a thread of ours looks until there are none. On several processes a
    signal reaches the threads of all, some of which still write; this is for a process alone.

    Args:
      before: the threads that there were before the save.
    """
    known = set(before)

    def end() -> None:
        while waiting := _waiting(known):
            for thread in waiting:
                thread.cancel()  # it does nothing once it has its signals
                future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
            time.sleep(LOOK)

    threading.Thread(target=end, name="jaxfb abandoned save", daemon=True).start()


def _waiting(known: set[threading.Thread]) -> list[Any]:
    """Returns Orbax's threads that run, without the known ones."""
    return [
        thread for thread in threading.enumerate() if isinstance(thread, _WAITING) and thread not in known
    ]
