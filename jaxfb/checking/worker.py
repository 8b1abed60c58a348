"""Runs cases in other processes: an abort of XLA ends one of them and not the search, and a hang ends too.

Nothing in here imports JAX but the process that runs cases.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.draw import NUM_DEVICES, draw
from jaxfb.checking.outcome import ABORTED, HUNG, SAME, Outcome
from jaxfb.refusal import Refused, shown
from jaxfb.training.job.simulated import simulate_devices

CASES_OF_ONE_PROCESS = 50  # compiled programs stay in memory
START = 300.0  # seconds until a process has imported everything
CAUSES = re.compile(r"Check failed|Fatal|Termination timeout|Invalid|Unexpected|error", re.IGNORECASE)
Request = int | Case
"""The index of a case to draw, or a case."""


@dataclass(frozen=True)
class Setup:
    """Collects what a process is started with.

    model: "module:function" that gives the user's (model, params, batch), or None for the toys.
    axes: those that the mesh of a user's model may have; None for all but expert and context.
    limit: seconds that one case may take.
    """

    seed: int = 0
    model: str | None = None
    axes: Sequence[str] | None = None
    limit: float = 600.0


@dataclass(frozen=True)
class _Running:
    """Groups a process, the pipe to it and the file of what it prints."""

    process: SpawnProcess
    pipe: Connection
    errors: Path


class Worker:
    """Runs one case after another in a process, which is replaced when it ends."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._running: _Running | None = None
        self._done = 0

    def __call__(self, request: Request) -> tuple[Case, Outcome]:
        """Runs a case. One that ends the process or hangs is tried once more, alone in a new process.

        Raises:
          ValueError: the user's model cannot be used.
        """
        company = self._done
        case, outcome = self._ask(request)
        if outcome.status not in (ABORTED, HUNG) or not company:
            return case, outcome
        _, alone = self._ask(case)
        self.close()
        if alone.status != SAME:
            return case, alone
        return case, replace(outcome, detail=f"after {company} other cases in one process: {outcome.detail}")

    def close(self) -> None:
        """Ends the process."""
        if self._running is not None:
            self._running.process.kill()
            self._running.process.join()
            self._running.pipe.close()
            self._running.errors.unlink(missing_ok=True)
        self._running, self._done = None, 0

    def _ask(self, request: Request) -> tuple[Case, Outcome]:
        running = self._running
        if running is None or self._done >= CASES_OF_ONE_PROCESS:
            running = self._start()
        case = request if isinstance(request, Case) else None
        try:
            running.pipe.send(request)
            case = _receive(running.pipe, START)
            outcome = _receive(running.pipe, self._setup.limit)
        except TimeoutError:
            outcome = Outcome(HUNG, f"nothing came back within {self._setup.limit:g} seconds", HUNG)
        except (EOFError, OSError):
            running.process.join()
            outcome = Outcome(ABORTED, _how_it_ended(running), ABORTED)
        if case is None:
            raise RuntimeError(f"a process of the search could not start: {outcome.detail}")
        self._done += 1
        if outcome.status in (ABORTED, HUNG):
            self.close()
        return case, outcome

    def _start(self) -> _Running:
        self.close()
        handle, errors = tempfile.mkstemp(prefix="jaxfb-check-", suffix=".log")
        os.close(handle)
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._setup, errors), daemon=True)
        self._running = _Running(process, pipe, Path(errors))
        process.start()
        theirs.close()
        if (refusal := _receive(pipe, START)) is not None:
            self.close()
            raise Refused(refusal)
        return self._running


def _receive(pipe: Connection, limit: float):
    if not pipe.poll(limit):
        raise TimeoutError
    return pipe.recv()


def _how_it_ended(running: _Running) -> str:
    """Describes how the process ended, and what it wrote about that."""
    code = running.process.exitcode
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    lines = running.errors.read_text(errors="replace").splitlines()
    causes = [line for line in lines if CAUSES.search(line)] or lines[-3:]
    return f"{how}: {' / '.join(line[:300] for line in causes[:3])}"


def _raised(error: Exception, setup: Setup) -> str:
    """Returns what a model of the caller's raised, and where, as a sentence."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename}, line {last.lineno}, in {last.name}"
    return f"[check] --model {setup.model} raised {type(error).__name__}: {shown(str(error), 300)} ({place})"


def _serve(pipe: Connection, setup: Setup, errors: str) -> None:
    """Runs in the new process: draws and runs what it is asked for, until the pipe closes."""
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    simulate_devices({"any": NUM_DEVICES})
    from jaxfb.checking.comparison.trial import try_case
    from jaxfb.checking.toy_models import problem

    try:
        own = None if setup.model is None else problem.load(setup.model)
        around = None if own is None else problem.facts(own, setup.axes)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, ValueError) else _raised(error, setup))
        return
    pipe.send(None)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        case = request if isinstance(request, Case) else draw(setup.seed, request, around)
        pipe.send(case)
        pipe.send(try_case(case, own))
