"""The signals that end a run in an orderly way: Ctrl-C, SIGTERM and, where a terminal may be closed, SIGHUP."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

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


@contextmanager
def ended_in_imports() -> Iterator[None]:
    """Ends the process at a Ctrl-C that comes while something is imported, as a process that does not catch it ends.

    What is half imported would raise errors of any kind, such as an ImportError of numpy's. Elsewhere Ctrl-C raises
    KeyboardInterrupt as usual. A program that catches it in another way keeps its handler.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            raise KeyboardInterrupt
        # standard error may be closed, or in the middle of a line
        with suppress(OSError, ValueError, RuntimeError, AttributeError):
            print("jaxfb: stopped", file=sys.stderr, flush=True)
            sys.stdout.flush()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether a call of the import system is among the callers of a frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
