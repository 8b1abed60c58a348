"""Starts the processes of a job on this machine and starts them again when they are lost. No jax is imported.

start -> all end -> done, refused, interrupted or given up: end likewise
                 -> lost or crashed: wait, start again, with --resume once the run has begun
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxfb.process.exit_codes import DONE, FAULTY, GAVE_UP, LOST, REFUSED, RESUMABLE, UNWRITTEN
from jaxfb.process.launcher import Connection
from jaxfb.process.loopback import free_port
from jaxfb.process.signals import ENDING, HANGUP, caught_here

# after these another start would change nothing
FINAL = (DONE, REFUSED, UNWRITTEN, RESUMABLE, GAVE_UP, FAULTY)
STOPPING = 15.0  # seconds that the others get to notice, once one process has ended for good or was lost
AFTER_A_KILL = 5.0  # the same, where one was killed: the others cannot continue, and have nothing to save
AFTER_A_SECOND_SIGNAL = 5.0  # the same for all of them; one whose Python does not run cannot end by itself
ONE_SIGNAL = 1.0  # seconds within which a signal counts once, as for a run
AFTER_THE_END = 300.0
"""The same, once one is done: the others are at their end too, but may still upload what they logged."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
DOUBLINGS = 16  # of the wait, far beyond the longest; 2**1024 is not a float

# (index, number of processes, coordinator or None, whether the run has begun) -> command and environment
Command = Callable[[int, int, "str | None", bool], tuple[list[str], dict[str, str]]]


@dataclass
class Supervisor:
    """Runs a job as several processes of this machine.

    command:   makes the command line of one process.
    processes: how many there are.
    restarts:  how often in a row the job is started again without having run longer than `healthy` seconds.
    healthy:   seconds after which a start counts as successful, so that restarts are counted from zero again.
    stopping:  seconds that the others get once one has ended badly. ending: the same, once one has ended with 0.
    report:    receives a sentence for each restart.
    config:    a file that each start reads; that it was changed is reported.
    """

    command: Command
    processes: int = 1
    restarts: int = 3
    healthy: float = 300.0
    stopping: float = STOPPING
    ending: float = AFTER_THE_END
    report: Callable[[str], None] = field(default=lambda text: _print(text))
    config: Path | None = None

    def run(self) -> int:
        """Returns the exit code of the job: 0 only if every process of the last start ended with 0.

        SIGTERM, SIGINT and SIGHUP are passed on to every process, which continues where it was stopped; the job is then
        not started again, and a second one ends it. Where a process was killed the code is 128 and the signal, as a
        shell has it.
        """
        self._children: list[subprocess.Popen] = []
        self._signalled: int | None = None
        self._signalled_at, self._insists = math.inf, False  # when first; whether there was a second one
        self._connection = Connection()
        before = {number: signal.signal(number, self._pass_on) for number in caught_here()}
        try:
            code = self._supervise()
            return code if code >= 0 else 128 - code
        finally:
            self._connection.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _supervise(self) -> int:
        failures, begun, config = 0, False, _content(self.config)
        while True:
            started = time.monotonic()
            code = self._run_once(begun)
            if self._signalled and -code in ENDING:  # it came before the process could catch it
                return RESUMABLE
            if code in FINAL or self._signalled:
                return code
            begun = self._connection.has_begun() or begun
            failures = 1 if time.monotonic() - started > self.healthy else failures + 1
            if failures > self.restarts:
                self.report(f"jaxfb: [launch] {_ending(code)}, {failures} times in a row; giving up")
                return code
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(failures - 1, DOUBLINGS))
            self.report(
                f"jaxfb: [launch] the job was {_ending(code)}; starting again{' with --resume' * begun} in {wait:g} s "
                f"(restart {failures} of {self.restarts})"
            )
            self._sleep(wait)
            if (now := _content(self.config)) != config:
                config = now
                self.report(
                    f"jaxfb: [launch] {self.config} was changed since the last start, and this one reads it again"
                )
            if self._signalled:
                self.report(f"jaxfb: [launch] {_signal_name(self._signalled)}: the job is not started again")
                return RESUMABLE

    def _run_once(self, begun: bool) -> int:
        try:
            self._start_all(begun)
            return self._wait()
        except OSError as error:  # such as too many processes
            started = f"process {len(self._children)} of {self.processes}"
            self.report(f"jaxfb: [launch] {started} could not be started: {error.strerror or error}")
            return LOST
        finally:
            self._end_all()

    def _start_all(self, begun: bool) -> None:
        coordinator = f"127.0.0.1:{free_port()}" if self.processes > 1 else None
        for index in range(self.processes):
            line, environment = self.command(index, self.processes, coordinator, begun)
            environment = {**os.environ, **environment, **self._connection.environment}
            child = subprocess.Popen(line, env=environment, pass_fds=self._connection.passed)
            self._children.append(child)
            if self._signalled:  # while it was being started, so that it was not passed on to it
                child.send_signal(self._signalled)

    def _wait(self) -> int:
        """Waits until all processes have ended, or for a while once one has; returns the worst code."""
        deadline = math.inf
        while None in (codes := [child.poll() for child in self._children]):
            now = time.monotonic()
            deadline = min(deadline, now + self._patience([code for code in codes if code is not None]))
            if now > deadline:
                self._report_late(codes)
                break
            time.sleep(0.05)
        return _of_all([LOST if code is None else code for code in codes])

    def _report_late(self, codes: Sequence[int | None]) -> None:
        """Reports why processes are killed, where no other one of the job has failed."""
        if self._insists and self._signalled:
            since = f"{AFTER_A_SECOND_SIGNAL:g} s after a second {_signal_name(self._signalled)}"
        elif not any(codes):
            since = f"{self.ending:g} s after another, which was done"
        else:
            return
        late = ", ".join(str(index) for index, code in enumerate(codes) if code is None)
        self.report(f"jaxfb: [launch] process {late} of {self.processes} has not ended {since}; it is killed")

    def _patience(self, codes: Sequence[int]) -> float:
        """Returns the seconds that the others get, at most, where some have ended with these codes."""
        if self._insists:
            return AFTER_A_SECOND_SIGNAL
        if not codes:
            return math.inf
        if all(code == DONE for code in codes):
            return self.ending
        return min(self.stopping, AFTER_A_KILL) if min(codes) < 0 else self.stopping

    def _end_all(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()
        self._children = []

    def _pass_on(self, number: int, frame: object) -> None:
        now = time.monotonic()
        self._insists |= number != HANGUP and now - self._signalled_at > ONE_SIGNAL
        self._signalled, self._signalled_at = number, min(self._signalled_at, now)
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)
                child.send_signal(signal.SIGCONT)  # one that is stopped would not notice

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._signalled:
            time.sleep(0.05)


def _content(path: Path | None) -> bytes | None:
    """Returns what a file holds, None where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes() if path else None
    return None


def config_of(arguments: Sequence[str]) -> Path | None:
    """Returns the file of the config in the arguments of a job; None where they name a run, or a config by name."""
    return next((Path(word) for word in arguments[1:] if os.path.isfile(word)), None)


def job_command(arguments: Sequence[str], python: str = sys.executable) -> Command:
    """Returns the commands of a `jaxfb` job, such as ["train", "config.yaml"]; --resume is added once it has begun.

    Before, what lies in its directory may be another run, which is not to be continued.
    """

    def command(index: int, processes: int, coordinator: str | None, begun: bool):
        line = [python, "-m", "jaxfb.cli", *(_continuing(arguments) if begun else arguments)]
        if coordinator is None:
            return line, {}
        return line, {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(index),
        }

    return command


def _continuing(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments that continue a run; one of --smoke begins anew, since its directory is gone."""
    line = [word for word in arguments if not _is_short_for("--fresh", word)]
    if any(_is_short_for(flag, word) for word in line for flag in ("--resume", "--smoke")):
        return line
    return [*line, "--resume"]


def _is_short_for(flag: str, word: str) -> bool:
    """Returns whether the command line takes the word for the flag, as it does with the first letters."""
    return len(word) > 2 and flag.startswith(word)


def _of_all(codes: Sequence[int]) -> int:
    """Returns the code that decides: a final one of any process, or else the first that is not 0.

    A crash comes before 76, with which the others only answer it.
    """
    for wanted in (REFUSED, UNWRITTEN, FAULTY, GAVE_UP, RESUMABLE):
        if wanted in codes:
            return wanted
    bad = [code for code in codes if code != DONE]
    return next((code for code in bad if code != LOST), bad[0] if bad else DONE)


def _ending(code: int) -> str:
    if code == LOST:
        return "lost (exit code 76)"
    return f"killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    """Returns such as SIGKILL; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _print(text: str) -> None:
    """Prints to standard error, as long as somebody reads it: the job goes on without."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
