"""SIGINT and SIGTERM end a run between two updates: the state is saved, nothing is lost."""

from __future__ import annotations

import signal
import threading


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `.signal`; a second one acts as it always does.

    Outside the main thread (a notebook's worker, a test) signals cannot be caught, and none is.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signal: str | None = None
        self._before = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame) -> None:
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
