"""Notices at once that writing a checkpoint has failed on this process.

Orbax raises it only after all processes have come to the end of the save. Those whose own part is written wait for the
one whose part is not, for up to 20 minutes. But it logs the error when it occurs.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from etils import epath

IN_BACKGROUND = "background save thread"
PREEMPTION = "Reached preemption sync point"
LOOK = 0.2  # seconds between two looks


class WriteErrors(logging.Filter):
    """The errors that Orbax has logged of saves in the background; a filter of its logger that lets none of them pass.

    They are raised by `CheckpointStore` as well.
    """

    def __init__(self):
        super().__init__()
        self._found: list[tuple[str, BaseException]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether a record is to be printed; keeps the error of one that is not.

        That a run ends because of a signal is printed by the run, once; Orbax reports it five times in each process.
        """
        if "orbax" not in record.pathname:
            return True
        if record.levelno != logging.ERROR:
            return PREEMPTION not in record.getMessage()
        error, text = record.exc_info and record.exc_info[1], record.getMessage()
        if error and IN_BACKGROUND in text:
            self._found.append((text, error))
        return False

    def forget(self, directory: epath.Path) -> None:
        """Drops what is known of saves below a directory, before another save."""
        self._found = [one for one in self._found if str(directory) not in one[0]]

    def of(self, directory: epath.Path) -> BaseException | None:
        """Returns the first error of a save below a directory."""
        return next((error for text, error in self._found if str(directory) in text), None)


class _WithoutLateAnswers:
    """A hook of `sys` for errors that nobody catches; it leaves out those of `quiet_late_answers`."""

    def __init__(self, hook: Callable[..., object]):
        self._hook = hook

    def __call__(self, *told: Any) -> None:
        error = told[1] if len(told) == 3 else told[0].exc_value  # of excepthook, or of unraisablehook
        in_main = threading.current_thread() is threading.main_thread()
        if in_main or not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
            self._hook(*told)


def quiet_late_answers() -> None:
    """Keeps threads of the storage library from printing a traceback for every array of a save that failed meanwhile.

    They find the event loop closed that waited for their answers, and the error of the save is raised anyway. Which
    hook they call depends on the library's version.
    """
    for name in ("excepthook", "unraisablehook"):
        if not isinstance(hook := getattr(sys, name), _WithoutLateAnswers):
            setattr(sys, name, _WithoutLateAnswers(hook))


def wait_for(result: Callable[[], object], failed: Callable[[], BaseException | None]) -> None:
    """Returns when `result` does.

    Raises:
      BaseException: what `result` raises, or what `failed` returns before that.
    """
    raised: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            result()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=call, name="jaxfb save", daemon=True).start()
    while not done.wait(LOOK):
        if (error := failed()) is not None:
            raise error
    if raised:
        raise raised[0]
