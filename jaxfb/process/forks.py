"""Keeps processes that are forked from a run from catching its signals, holding its lock and continuing it.

Rewards, callbacks and data sources fork, such as by `multiprocessing` with the start method "fork". A child that caught
SIGTERM as the run does would not end by `terminate`, and would tell the run's own listener of it, which ends the run at
the second one. One that outlives a killed run would keep its directory locked.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from jaxfb.process.signals import ENDING

_closed_in_children: set[int] = set()
_masks = threading.local()


def close_in_children(file: int) -> None:
    """Closes a file descriptor in every process that is forked from now on, until it is forgotten."""
    _closed_in_children.add(file)


def forget(file: int) -> None:
    """Takes back `close_in_children`, before the descriptor is closed here and its number is given to another file."""
    _closed_in_children.discard(file)


@contextmanager
def ending_children() -> Iterator[None]:
    """Ends a process that was forked inside the context once it leaves it, as by an error or Ctrl-C."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        end_if_forked(process, error)
        raise
    end_if_forked(process)


def end_if_forked(process: int, error: BaseException | None = None) -> None:
    """Ends this process if it is not `process`, but a child of it that has come back from the function that forked it.

    error: that it raised there; it is printed, unless it is a SystemExit, which decides the exit code.
    """
    if os.getpid() == process:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    os._exit(code & 0xFF)


def _before() -> None:
    # a signal to the child that came before `_in_child` would count as one to the run
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if _caught() else ())


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _in_child() -> None:
    ours = _caught()
    for number in ours:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if ours:
        signal.set_wakeup_fd(-1)
    for file in _closed_in_children:
        with suppress(OSError):  # closed by somebody else
            os.close(file)
    _closed_in_children.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _caught() -> list[int]:
    """Returns the signals that a run catches; none where there is no run."""
    return [number for number in ENDING if _is_ours(signal.getsignal(number))]


def _is_ours(handler: object) -> bool:
    return (getattr(handler, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
