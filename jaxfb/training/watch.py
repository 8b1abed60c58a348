"""Notices that a process of the job is gone, has failed or hangs, and ends the others with a sentence.

Without it they would wait in a collective: for minutes at best, at worst for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxfb.config.sections import HostsConfig

LOST = 76  # exit code: a process of the job was lost, came not, or failed; started again, it goes on
GRACE = 3.0  # seconds in which processes that fail together may each report it themselves
LAST_WORDS = 10.0  # seconds that process 0, which runs the coordinator, waits for the others to have left


class LostProcess(RuntimeError):
    """Another process of the job is gone: this one cannot go on, a new start with --resume can."""


class Watch:
    """A thread that writes a sign of life to the job's key-value store and reads those of the others.

    client: the coordination service's. name: of this process in messages, such as "process 1 of 2 (node7)".
    """

    def __init__(self, client: Any, prefix: str, index: int, names: list[str], config: HostsConfig):
        self._client, self._prefix, self._index, self._names = client, prefix, index, names
        self._lost_after, self._stuck_after = config.lost_after, config.stuck_after
        self._every = min(config.lost_after / 5, 5.0)
        self.update = 0  # that this process has reached
        self._moved = ({}, time.monotonic())
        self._seen: dict[int, tuple[str, float]] = {}
        self._ended, self._verdict = threading.Event(), None
        self._gone: set[int] = set()
        self._found = threading.Event()
        self._main_decides = False
        self.advice: Callable[[], str] = lambda: "start all again"
        self._thread = threading.Thread(target=self._run, name="jaxfb watch", daemon=True)

    def start(self) -> None:
        """Begins; every process counts as alive now."""
        now = time.monotonic()
        self._seen = {other: ("", now) for other in range(len(self._names)) if other != self._index}
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what happens to the others is no longer looked at."""
        self._ended.set()

    def cause(self, seconds: float) -> str | None:
        """Returns what became of the others, if found within so many seconds; then this process reports it."""
        self._main_decides = True
        self._found.wait(seconds)
        return self._verdict

    def fail(self, reason: str) -> None:
        """Tells the others that this process has failed; process 0 stays until they have left, or for a while."""
        self._main_decides = True
        with _ignored():
            self._client.key_value_set(f"{self._prefix}/failed/{self._index}", reason, allow_overwrite=True)
        deadline = time.monotonic() + LAST_WORDS
        while self._index == 0 and time.monotonic() < deadline:
            with _ignored():
                if len(self._gone | set(self._read("failed"))) == len(self._names):
                    return
            time.sleep(0.2)

    def _run(self) -> None:
        beats = 0
        while not self._ended.wait(self._every if beats else 0):
            beats += 1
            with _ignored():
                self._client.key_value_set(
                    f"{self._prefix}/beat/{self._index}", f"{beats} {self.update}", allow_overwrite=True
                )
                self._verdict = self._failed(self._read("failed")) or self._still(self._read("beat"))
            if self._verdict:
                self._found.set()
                return self._end()

    def _end(self) -> None:
        """Ends this process, unless the main thread has noticed and does."""
        self._ended.wait(GRACE)
        if self._main_decides or self._ended.is_set():
            return
        print(f"jaxfb: {self._verdict}; {self.advice()}", file=sys.stderr, flush=True)
        self.fail(str(self._verdict))
        leave(LOST)

    def _failed(self, said: Mapping[int, str]) -> str | None:
        for other, reason in said.items():
            if other != self._index:
                return f"[hosts] {self._names[other]} failed: {reason}; {self._names[self._index]} ends"
        return None

    def _still(self, beats: Mapping[int, str]) -> str | None:
        return self._silent(beats) or self._stuck(
            {other: int(beat.split()[1]) for other, beat in beats.items()}
        )

    def _stuck(self, updates: Mapping[int, int]) -> str | None:
        now, (last, since) = time.monotonic(), self._moved
        if updates != last or not any(updates.values()):
            self._moved = (dict(updates), now)
        elif self._stuck_after is not None and now - since > self._stuck_after:
            behind = min(updates, key=lambda other: (updates[other], other))
            return (
                f"[hosts] no process has begun another update for {self._stuck_after:g} s: {self._names[behind]} is in "
                f"update {updates[behind]}, the furthest in {max(updates.values())}; {self._names[self._index]} ends"
            )
        return None

    def _silent(self, beats: Mapping[int, str]) -> str | None:
        now = time.monotonic()
        for other, (last, since) in self._seen.items():
            beat = beats.get(other, "")
            if beat != last:
                self._seen[other] = (beat, now)
            elif now - since > self._lost_after:
                self._gone.add(other)
        if not self._gone:
            return None
        silent = [self._names[other] for other in sorted(self._gone)]
        return (
            f"[hosts] {', '.join(silent)} has given no sign of life for {self._lost_after:g} s and counts as lost; "
            f"{self._names[self._index]} ends"
        )

    def _read(self, kind: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{self._prefix}/{kind}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def leave(code: int) -> None:
    """Ends this process now. An orderly end would wait for the others, who will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ignored() -> contextlib.suppress:
    """Returns what the coordination service raises; where it is gone for good, the runtime ends the process itself."""
    return contextlib.suppress(jax.errors.JaxRuntimeError)
