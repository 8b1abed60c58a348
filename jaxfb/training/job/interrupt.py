"""A signal, a limit or a failure that can wait ends a run between two updates: the state is saved, nothing is lost.

In start-up, where there is nothing to save, a signal ends the run there and then; a second one always does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from jaxfb.process import forks  # noqa: F401  children that are forked do not catch what is caught here
from jaxfb.process.exit_codes import RESUMABLE
from jaxfb.process.signals import ENDING, HANGUP, caught_here
from jaxfb.training.job.abort import foreign_handler
from jaxfb.training.job.watch import MOMENT, leave, tell

UNWINDING = 10.0  # seconds in which the main thread may end in an orderly way; it cannot while it compiles
ONE_SIGNAL = (
    1.0  # seconds within which a signal counts once: launchers pass on what the terminal has sent to all
)


class Stopped(BaseException):
    """A signal came before there was anything to save. No `Exception`, so that nobody takes it for a failure.

    newest: tells the update that is saved, once the checkpoints were looked at.
    """

    newest: Callable[[], int | None] | None = None


def keep_for_good(stopped: Stopped) -> None:
    """Keeps all that the interrupted calls were working on: to free a program that jax has half built is a SIGSEGV."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stopped))


class Interrupt:
    """Catches the first SIGINT, SIGTERM or SIGHUP and only sets `.signal`; a second one ends the process.

    A SIGHUP that is ignored stays so, and a second one is none: who closes a terminal cannot insist.

    begun: there are updates that a signal should save; before that it raises `Stopped` in the main thread, and where
      that computes for long outside of Python, it ends the process.

    Signals are read in a thread of their own, so that they count while the main thread is stuck. Outside of the main
    thread (a notebook's worker, a test) signals cannot be caught, and none is.

    Among several processes a signal to any ends all after the same update, which jax's preemption service finds. So
    does the limit of minutes, by the clock of process 0.

    signal: what ended the run, such as "SIGTERM" or "run.stop_at=40".
    """

    SIGNALS = ENDING

    def __init__(self):
        self.limit(None, None)
        self._limit: str | None = None
        self._sent: str | None = None  # the signal that came to this process, of several
        self.signal: str | None = None
        self.failure: str | None = None
        self.remedy = ""
        self.begun = False
        self._several, self._to_jax = False, None
        self._seen_by_main, self._seen_by_thread = _Count(), _Count()
        self._before = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = {number: signal.signal(number, self._in_main) for number in caught_here()}
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, name="jaxfb signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        os.write(self._writer, b"\0")  # the listener closes both ends

    def join(self) -> None:
        """Takes SIGTERM back from jax, which catches it from the moment the processes have joined."""
        self._several = jax.process_count() > 1
        if self._several and self._before:
            self._to_jax = foreign_handler(signal.SIGTERM, self._in_main)

    def is_due(self, update: int) -> bool:
        """Returns whether the run ends after this update; every process asks after each update."""
        if self._several and multihost_utils.reached_preemption_sync_point(update):
            self.signal = self._limit or self._sent or signal.SIGTERM.name
        if self._minutes is not None and time.monotonic() - self._began >= 60 * self._minutes:
            self._reach(f"run.minutes={self._minutes:g}")
        if update == self._stop_at:
            self.signal = f"run.stop_at={update}"
        return self.signal is not None

    def fail(self, what: str, remedy: str = "") -> None:
        """Ends the run after this update, saved; `failure` then describes what went wrong, and `remedy`, such as "free
        some space, then ", what is to be done before it continues. Asked by any process.
        """
        self.failure, self.remedy = what, remedy
        if self._several:
            self._announce()
        else:
            self.signal = self.signal or what

    def limit(self, minutes: float | None, stop_at: int | None) -> None:
        """Ends the run when so many minutes have passed since now, or after update `stop_at`."""
        self._minutes, self._stop_at, self._began = minutes, stop_at, time.monotonic()

    def _reach(self, limit: str) -> None:
        """Ends the run for a reason that the processes do not see after the same update."""
        if not self._several:
            self.signal = self.signal or limit
        elif jax.process_index() == 0 and self._limit is None:
            self._limit = limit
            self._announce()

    def _in_main(self, number: int, frame) -> None:
        """Handles a signal in the main thread, as soon as that runs Python."""
        if self._seen_by_main.is_second(number):
            if number == signal.SIGINT:
                raise KeyboardInterrupt
        elif self._seen_by_main.is_first():
            name = signal.Signals(number).name
            if not self.begun:
                raise Stopped(name)
            if not self._several:
                self.signal = name

    def _listen(self) -> None:
        """Reads the signals in this thread; the number 0 ends it."""
        while number := os.read(self._reader, 1)[0]:
            if number in self.SIGNALS:
                self._in_thread(signal.Signals(number))
        os.close(self._reader)
        os.close(self._writer)

    def _in_thread(self, number: signal.Signals) -> None:
        if self._seen_by_thread.is_second(number):
            if number == signal.SIGINT:  # a KeyboardInterrupt, where the main thread runs Python
                self._later(lambda: self._end_now(number))
            else:
                self._end_now(number)
        elif self._seen_by_thread.is_first():
            if not self.begun:
                self._later(lambda: self._end_unsaved(number))
            elif self._several:
                self._sent = number.name
                self._announce()

    def _later(self, end: Callable[[], None]) -> None:
        """Ends the process where the main thread has not left the run by then."""
        timer = threading.Timer(UNWINDING, lambda: self._before and end())
        timer.daemon = True
        timer.start()

    def _end_unsaved(self, number: signal.Signals) -> None:
        if self.signal is None:
            tell(f"jaxfb: {stopped_early(number.name)}", seconds=MOMENT)
            leave(RESUMABLE)

    def _end_now(self, number: signal.Signals) -> None:
        tell(f"jaxfb: {number.name} again: ended at once, without saving", seconds=MOMENT)
        leave(128 + number)

    def _announce(self) -> None:
        if self._to_jax is not None:
            self._to_jax(signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)


class _Count:
    """Tells the first signal from a second one; a repetition of the first is neither."""

    def __init__(self):
        self._first: float | None = None

    def is_second(self, number: int) -> bool:
        late = self._first is not None and time.monotonic() - self._first > ONE_SIGNAL
        return late and number != HANGUP

    def is_first(self) -> bool:
        first, self._first = self._first is None, self._first or time.monotonic()
        return first


def stopped_early(name: str) -> str:
    """Returns the sentence of a run that a signal ended in its start-up."""
    return f"{name} in start-up: nothing was trained, so nothing is lost"
