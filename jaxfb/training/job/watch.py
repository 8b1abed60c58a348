"""Notices that a process of the job is gone, has failed or hangs, and ends the others with a sentence.

Without it they would wait in a collective: for minutes at best, at worst for ever. One process alone watches itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxfb.config.operation import HostsConfig
from jaxfb.process.exit_codes import LOST, REFUSED, RESUMABLE, UNWRITTEN
from jaxfb.process.position import Position, here
from jaxfb.training.job.signs import Sign, Signs

GRACE = 3.0  # seconds in which processes that fail together may each report it themselves
MOMENT = 1.0  # seconds in which others that have failed too may end; without the coordinator they would abort
LAST_WORDS = 10.0  # seconds that process 0, which runs the coordinator, waits for the others to have left
BRIEFLY = (
    5.0  # seconds for what needs the disk or the coordinator while the process ends; either may be what hangs
)
LAST_THREADS = 30.0  # seconds that other threads get once the main thread has ended after a failure
NATIVE_MARGIN = 60.0  # seconds after which a process ends whose Python does not run at all
SIGNS_APART = 3  # updates, at least 0.25 s, and more seconds in a job of very many processes
STDERR = 2
FAILED, STUCK, STOPPED, REFUSES, CANNOT_WRITE = "failed", "stuck", "stopped", "refuses", "cannot write"
"""How a process ends that tells the others."""
EXIT_CODES = {FAILED: LOST, STUCK: LOST, STOPPED: RESUMABLE, REFUSES: REFUSED, CANNOT_WRITE: UNWRITTEN}
"""With which the others end. Where another start would change nothing it is final for them too: where each host has a
`jaxfb launch`, theirs would start again and wait for a process that does not come."""


class LostProcess(RuntimeError):
    """Another process of the job is gone: this one cannot continue, a new start with --resume can.

    exit_code: with which a command ends, and a program that takes part in a run when this comes.
    """

    def __init__(self, message: str, exit_code: int = LOST):
        super().__init__(message)
        self.exit_code = exit_code


class Watch:
    """Threads that tell the others of this process and look at what they tell; alone, at this one only.

    client: the coordination service's, None where this process is alone. names: of the processes in messages, such as
    "process 1 of 2 (node7)". position: of this process.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        index: int,
        names: list[str],
        config: HostsConfig,
        position: Position = here,
    ):
        self._client, self._prefix, self._index, self._names = client, prefix, index, names
        self._position, self._stuck_after = position, config.stuck_after
        self._every = min(config.lost_after / 5, (config.stuck_after or 25.0) / 5, 5.0)
        self._lost_after = config.lost_after
        self._signs = Signs(index, names, config.lost_after, config.stuck_after)
        self._ended, self._found = threading.Event(), threading.Event()
        self._news = threading.Event()  # that another process has ended, or this one does
        self._arming = threading.Lock()
        self._verdict: str | None = None
        self._kind, self._main_decides = FAILED, False
        self._pace: tuple[list[float] | None, dict[int, str]] = (None, {})
        self._heard: dict[int, Sign] = {}  # the newest of the others
        self._reports: dict[int, list[str]] = {}  # process -> [kind, reason], of those that end
        self._answered = time.monotonic()  # when the coordinator last did
        self._thread = threading.Thread(target=self._run, name="jaxfb watch", daemon=True)
        self.advice: Callable[[], str] = start_again

    def start(self) -> None:
        """Begins; every process counts as alive now."""
        self._answered = time.monotonic()
        if self._client is not None:
            threading.Thread(target=self._exchange, name="jaxfb signs", daemon=True).start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the threads; what happens to the others is no longer looked at.

        The advice can refer to a run and its arrays: were the thread the last to have it, it would free them while the
        interpreter ends, and arrays of JAX that a thread frees then abort the process.
        """
        with self._arming:
            self._ended.set()
            self._news.set()
            if self._stuck_after is not None:
                faulthandler.cancel_dump_traceback_later()
        if self._thread.is_alive():
            self._thread.join(GRACE)
        self.advice = start_again

    def cause(self, seconds: float) -> str | None:
        """Returns what became of the others, if found within so many seconds; then this process reports it."""
        self._main_decides = True
        self._found.wait(seconds)
        return self._verdict

    @property
    def kind(self) -> str:
        """Returns how this process ends because of the others, once the cause is found."""
        return self._kind

    def gone(self) -> set[int]:
        """Returns the others that were lost or have ended early; this process no longer ends because of them."""
        self._main_decides = True
        self._signs.who_is_lost()
        coordinator = {0} if self._coordinator_is_silent() else set()
        return (self._signs.lost | set(self._reports) | coordinator) - {self._index}

    def pace(self) -> tuple[list[float] | None, dict[int, str]]:
        """Returns the seconds of an update that each process spends on its own, and a sentence for each slow one."""
        return self._pace

    def fail(self, reason: str, kind: str = FAILED) -> None:
        """Tells the others that this process has failed; process 0 stays until they have left, or for a while."""
        self._main_decides = True
        if self._client is None:
            return
        key, text = f"{self._prefix}/failed/{self._index}", json.dumps([kind, reason])
        briefly(lambda: self._client.key_value_set(key, text, allow_overwrite=True), None)
        deadline = time.monotonic() + LAST_WORDS
        while self._index == 0 and time.monotonic() < deadline:
            if len(self._signs.lost | set(briefly(lambda: self._read("failed"), {}))) == len(self._names):
                time.sleep(MOMENT)
                return
            time.sleep(0.2)

    def _exchange(self) -> None:
        """Tells of this process and reads of the others; in a thread, since a stopped coordinator never answers."""
        beat = 0
        while not self._ended.wait(self._interval() if beat else 0):
            beat += 1
            with _ignored():
                text = Sign.of(beat, self._position).write()
                self._client.key_value_set(f"{self._prefix}/beat/{self._index}", text, allow_overwrite=True)
                self._reports = {other: json.loads(text) for other, text in self._read("failed").items()}
                if set(self._reports) - {self._index}:
                    self._news.set()
                signs = {other: Sign.read(text) for other, text in self._read("beat").items()}
                self._heard = signs
                self._answered = time.monotonic()

    def _interval(self) -> float:
        """Returns seconds to the next sign: a few updates where these are short, so that a slow one is soon named."""
        if not self._position.whole:
            return self._every
        least = 0.25 * (1 + len(self._names) / 64)
        return min(self._every, max(least, SIGNS_APART * self._position.whole))

    def _run(self) -> None:
        looked = time.monotonic()
        # less than lost_after, which is at least five times as long as `_every`
        late = self._every * 2 + min(self._every, GRACE)
        while self._continues():
            now = time.monotonic()
            if now - looked > late:  # suspended, with the job or with the machine
                self._answered += now - looked
                self._signs.sleep(now - looked)
            looked = now
            self._arm()
            self._verdict = self._look()
            if self._verdict:
                self._found.set()
                self._ended.wait(GRACE)
                if self._kind != STUCK or self._look():  # a moment later it may have moved after all
                    self._end()
                else:
                    self._found.clear()
                    looked = time.monotonic()

    def _continues(self) -> bool:
        """Waits until it is time to look again, at once where another process has ended: process 0 waits LAST_WORDS for
        those that it ends, less than two intervals and GRACE. Returns whether this process has not ended.
        """
        self._news.wait(self._interval())
        self._news.clear()
        return not self._ended.is_set()

    def _look(self) -> str | None:
        """Returns why this process ends, None while it continues; `_kind` is how."""
        self._signs.update({**self._heard, self._index: Sign.of(0, self._position)})
        self._pace = (self._signs.own_seconds(), self._signs.who_is_slow())
        others = [other for other in self._reports if other != self._index]
        for other in sorted(others, key=lambda other: self._reports[other][0] == STOPPED):
            self._kind, reason = self._reports[other]
            ended = {STOPPED: "was stopped", REFUSES: "is refused"}.get(self._kind, "failed")
            return f"[hosts] {self._names[other]} {ended}: {reason}; {self._names[self._index]} ends"
        if silent := self._who_is_silent():
            self._kind = FAILED
            return silent
        if still := self._signs.who_is_stuck():
            self._kind = STUCK
            return still
        return None

    def _who_is_silent(self) -> str | None:
        """Names the others that are; where the coordinator answers nothing, nothing is known of them."""
        unanswered = time.monotonic() - self._answered
        if self._client is None or not self._index or unanswered <= 2 * self._every:
            return self._signs.who_is_lost()
        if not self._coordinator_is_silent():
            return None
        return (
            f"[hosts] {self._names[0]}, which runs the coordinator, has not answered for {self._lost_after:g} s and "
            f"counts as lost; {self._names[self._index]} ends"
        )

    def _coordinator_is_silent(self) -> bool:
        unanswered = time.monotonic() - self._answered
        return self._client is not None and self._index > 0 and unanswered > self._lost_after

    def _arm(self) -> None:
        """Lets the native watchdog end the process where a library keeps Python from running; this thread too."""
        with self._arming:
            if self._stuck_after is not None and not self._ended.is_set():
                # not one thread more may be allowed
                with contextlib.suppress(RuntimeError):
                    limit = self._stuck_after + NATIVE_MARGIN
                    faulthandler.dump_traceback_later(limit, exit=True, file=STDERR)

    def _end(self) -> None:
        """Ends this process, unless the main thread has noticed and does."""
        if self._main_decides or self._ended.is_set():
            return
        stacks = _stacks() if self._kind == STUCK else b""
        tell(f"jaxfb: {self._verdict}; {briefly(self.advice, start_again())}", stacks)
        self.fail(str(self._verdict), self._kind)
        leave(EXIT_CODES[self._kind])

    def _read(self, kind: str) -> Mapping[int, str]:
        found: Iterable[tuple[str, str]] = self._client.key_value_dir_get(f"{self._prefix}/{kind}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}


def leave(code: int) -> None:
    """Ends this process now. An orderly end would wait for the others, who will not come."""
    briefly(_flush, None, MOMENT)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or on a full disk
            stream.flush()


def tell(text: str, before: bytes = b"", seconds: float = BRIEFLY) -> None:
    """Prints a line to standard error while the process ends; nothing where that is closed, or nobody reads it.

    before: what is written before the line. A pipe that is full, since its reader is stopped, takes nothing for ever.
    """

    def write() -> None:
        rest = before
        while rest:
            rest = rest[os.write(STDERR, rest) :]
        print(text, file=sys.stderr, flush=True)

    briefly(write, None, seconds)


def _stacks() -> bytes:
    """Returns the stack of every thread, at most what a pipe holds.

    Not written to standard error from there: that happens with Python's lock, so that no thread could end the process
    where nobody reads.
    """
    with contextlib.suppress(OSError):  # such as too many open files
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        faulthandler.dump_traceback(file=writer)
        os.close(writer)
        with open(reader, "rb") as file:
            return file.read()
    return b""


def leave_after_main(code: Callable[[], int]) -> None:
    """Ends this process a while after its main thread, for whose other threads Python waits without limit.

    code: returns the exit code, once the main thread has ended.
    After a save that failed those of the storage library wait for other processes, which are gone by then.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(LAST_THREADS)
        leave(code())

    threading.Thread(target=end, name="jaxfb end", daemon=True).start()


def start_again() -> str:
    """Returns the advice for a run of which nothing better is known."""
    return "start the run again"


def briefly(function: Callable[[], Any], otherwise: Any, seconds: float = BRIEFLY) -> Any:
    """Returns what `function` returns, or `otherwise` where that takes longer; it is then left to itself."""
    found = [otherwise]

    def call() -> None:
        with _ignored():
            found[0] = function()

    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or none any more while Python ends
        call()
    else:
        thread.join(seconds)
    return found[0]


def _ignored() -> contextlib.suppress:
    """Returns a context that ignores errors of the coordination service, the disk and a stream that is closed.

    Where the service is gone for good, the runtime ends the process itself.
    """
    return contextlib.suppress(jax.errors.JaxRuntimeError, OSError, ValueError)
