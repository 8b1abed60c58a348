"""The signals that end a run in an orderly way: Ctrl-C, SIGTERM and, where a terminal may be closed, SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal is closed; not every system has it."""

ENDING: tuple[signal.Signals, ...] = (
    signal.SIGINT,
    signal.SIGTERM,
    *(() if HANGUP is None else (signal.Signals(HANGUP),)),
)


def caught_here() -> list[signal.Signals]:
    """Returns those that a run catches: all but a SIGHUP that is ignored, as under nohup."""
    return [number for number in ENDING if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN]


class Terminated(KeyboardInterrupt):
    """A SIGTERM that ends a command as Ctrl-C does."""

    number = signal.SIGTERM


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """Raises `Terminated` inside on SIGTERM, which `timeout` and schedulers send; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
