"""A signal, a limit or a failure that can wait ends a run between two updates: the state is saved, nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """Catches the first SIGINT or SIGTERM and only sets `.signal`; a second one acts as it always does.

    Outside the main thread (a notebook's worker, a test) signals cannot be caught, and none is.

    Among several processes a signal to any ends all after the same update: SIGTERM is left to jax's preemption
    service, which finds an update that all can still stop at, and SIGINT becomes one. So does the limit of minutes, by
    the clock of process 0.

    minutes: end the run when so many have passed since now. stop_at: end it after this update.
    signal:  what ended it, such as "SIGTERM" or "run.stop_at=40".
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, minutes: float | None = None, stop_at: int | None = None):
        self._minutes, self._stop_at, self._began = minutes, stop_at, time.monotonic()
        self._limit: str | None = None
        self.signal: str | None = None
        self.failure: str | None = None
        self._before = {}
        self._several = jax.process_count() > 1

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: self._note for number in self.SIGNALS}
            if self._several:
                handlers = {signal.SIGINT: self._pass_on}
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def is_due(self, update: int) -> bool:
        """Returns whether the run ends after this update; every process asks after each update."""
        if self._several and multihost_utils.reached_preemption_sync_point(update):
            self.signal = self._limit or signal.SIGTERM.name
        if self._minutes is not None and time.monotonic() - self._began >= 60 * self._minutes:
            self._reach(f"run.minutes={self._minutes:g}")
        if update == self._stop_at:
            self.signal = f"run.stop_at={update}"
        return self.signal is not None

    def fail(self, what: str) -> None:
        """Ends the run after this update, saved; `failure` then describes what went wrong. Asked by any process."""
        self.failure = what
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = self.signal or what

    def _reach(self, limit: str) -> None:
        """Ends the run for a reason that the processes do not see after the same update."""
        if not self._several:
            self.signal = self.signal or limit
        elif jax.process_index() == 0 and self._limit is None:
            self._limit = limit
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number).name
        self._restore()

    def _pass_on(self, number: int, frame) -> None:
        self._restore()
        os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
