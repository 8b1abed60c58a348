"""Ends the threads that a failed save leaves behind: some wait for signals of others that have failed.

They would wait for as long as one save may take, and Python waits for them when it ends.
"""

from __future__ import annotations

import threading
import time
from typing import Any

try:
    from orbax.checkpoint._src.futures import future, synchronization

    _WAITING: Any = future._SignalingThread
    _NUMBERS: Any = synchronization.OperationIdGenerator
except (ImportError, AttributeError):  # private names of Orbax; without them its threads are left alone
    _WAITING, _NUMBERS = (), None

LOOK = 0.2  # seconds between two looks
LONGEST_END = 60.0
"""Seconds that the next save waits for what a failed one is still writing."""


class SaveThreads:
    """Orbax's threads of one save, known by the numbers that Orbax gives its operations.

    Made before the save begins. A save that begins later has other numbers, so that its threads are left alone.
    """

    def __init__(self) -> None:
        self._first, self._end = _next_operation(), None
        self._ending: threading.Thread | None = None

    def begun(self) -> None:
        """Takes the operations until now for those of the save; later ones are not."""
        self._end = _next_operation()

    def end_waiting(self) -> None:
        """Ends the threads that wait, and returns at once.

        Threads that still write may start others, so a thread of ours looks until there are none. They are not stopped:
        `thread.cancel()` stops a write as well, and TensorStore 0.1 may then wait, with Python's lock, for its own
        thread, which waits for that lock. On several processes a signal reaches the threads of all, some of which still
        write; this is for a process alone.
        """
        numbers = {str(number) for number in range(self._first, self._end or _next_operation())}

        def end() -> None:
            while waiting := _waiting(numbers):
                for thread in waiting:
                    thread._cancelled = True  # it does nothing once it has its signals
                    future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
                time.sleep(LOOK)

        self._ending = threading.Thread(target=end, name="jaxfb abandoned save", daemon=True)
        self._ending.start()

    def wait_until_ended(self) -> None:
        """Returns when the threads that were to end have done so, or after a while.

        Until then they may make directories and files of the save, which are in the way of another one of that step.
        """
        if self._ending is not None:
            self._ending.join(LONGEST_END)


def _next_operation() -> int:
    """Returns the number that Orbax's next operation has, such as a save."""
    return 0 if _NUMBERS is None else int(_NUMBERS.get_current_operation_id()) + 1


def _waiting(numbers: set[str]) -> list[Any]:
    """Returns Orbax's threads that run for operations of these numbers; one's own part of it follows a dot."""
    threads: list[Any] = [thread for thread in threading.enumerate() if isinstance(thread, _WAITING)]
    return [thread for thread in threads if thread._operation_id.split(".")[0] in numbers]
