"""Starts runs in separate processes, with a fault or without, and compares how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxfb.chaos.jobs import TRAIN, Job
from jaxfb.process.exit_codes import REFUSED
from jaxfb.process.fault_points import VARIABLE
from jaxfb.process.launcher import Connection
from jaxfb.process.loopback import free_port
from jaxfb.refusal import Refused

AFTER_A_KILL = 30.0
"""Seconds that the other processes get to end by themselves, once one was killed."""


@dataclass(frozen=True)
class Ended:
    """The way the processes of a job ended, and what they wrote, process 0 first."""

    codes: tuple[int, ...]
    output: str

    @property
    def code(self) -> int:
        """Returns the exit code of the first process that did not end with 0; 0 if there is none."""
        return next((code for code in self.codes if code), 0)


@dataclass(frozen=True)
class Laboratory:
    """Runs of one small job, each in its own directory below `directory`.

    overrides: of all runs of `jaxfb train`, beside the job's own. limit: seconds for one run.
    """

    directory: Path
    overrides: tuple[str, ...] = ()
    limit: float = 600.0
    job: Job = TRAIN

    def of(self, job: Job) -> Laboratory:
        """Returns the one for another job; the same at each call."""
        if job is self.job:
            return self
        if job.name not in self._others:
            where = self.directory / job.name
            self._others[job.name] = replace(self, directory=where, job=job)
        return self._others[job.name]

    def run(
        self, name: str, fault: str = "", kill: str = "", process: int = 0, more: Sequence[str] = ()
    ) -> Ended:
        """Trains into the directory `name`, from its newest checkpoint if it has one.

        Args:
          fault: the name of one of `faults.FAULTS`, made inside the process; "" makes none.
          kill: "point:count" of `fault_points`, where a process dies; "": nowhere. process: which one.
          more: further overrides.
        """
        job = self.job
        where = [f"run.dir={self.path(name)}"]
        own = [] if job.command == "rl" else [f"data.cache_dir={self.directory / 'data'}", *self.overrides]
        line = [job.command, job.config, *job.overrides, *own, *where, *more, "--resume"]
        program = [sys.executable, "-m", "jaxfb.chaos.worker", fault or "-", *line]
        self.directory.mkdir(parents=True, exist_ok=True)
        logs = [self.directory / f"{name}.{index}.log" for index in range(job.processes)]
        placed = [program] if job.processes == 1 else [[*program, *place] for place in _places(job.processes)]
        environments = [self._environment(kill if index == process else "") for index in range(len(placed))]
        codes = finished(placed, environments, logs, self.limit)
        return Ended(codes, "".join(log.read_text(errors="replace") for log in logs))

    def path(self, name: str) -> Path:
        """Returns the directory of that run."""
        return self.directory / name

    @cached_property
    def reference(self) -> Path:
        """Returns the run that nothing happens to; made at the first use.

        Raises:
          ValueError: it is refused, as for an override.
        """
        ended = self.run("reference")
        if ended.code == REFUSED:
            reason = ended.output.strip().rpartition("jaxfb: ")[2]
            raise Refused(f"[chaos] the run without a fault is refused: {reason}")
        if ended.code:
            raise RuntimeError(f"the run without a fault ended with exit code {ended.code}: {ended.output}")
        return self.path("reference")

    @cached_property
    def _others(self) -> dict[str, Laboratory]:
        return {}

    def _environment(self, kill: str) -> Mapping[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        cpu = {"JAX_PLATFORMS": "cpu"} if self.job.processes > 1 else {}
        return {**environment, **cpu, **({VARIABLE: kill} if kill else {})}


def _places(processes: int) -> Iterator[list[str]]:
    """Yields the overrides that place each process of a job on this machine."""
    port = free_port()
    for index in range(processes):
        yield [
            f"hosts.coordinator=127.0.0.1:{port}",
            f"hosts.processes={processes}",
            f"hosts.process_id={index}",
        ]


def finished(
    commands: Sequence[list[str]],
    environments: Sequence[Mapping[str, str]],
    logs: Sequence[Path],
    limit: float,
) -> tuple[int, ...]:
    """Runs the processes of a job to their ends; returns their exit codes.

    As soon as one of them was killed the others have AFTER_A_KILL seconds left, since one that waits for a process that
    never came waits longer than a trial should. None is left running where this one is interrupted, or killed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(log.open("w")) for log in logs]
        connection = Connection()
        stack.callback(connection.close)
        children = []
        stack.callback(_kill, children)
        for command, environment, file in zip(commands, environments, files, strict=True):
            environment = {**environment, **connection.environment}
            how: dict[str, Any] = {"stdout": file, "stderr": file, "pass_fds": connection.passed}
            children.append(subprocess.Popen(command, env=environment, **how))
        deadline, shortened = time.monotonic() + limit, False
        while None in (codes := [child.poll() for child in children]):
            if not shortened and any(code is not None and code < 0 for code in codes):
                deadline, shortened = time.monotonic() + AFTER_A_KILL, True
            if time.monotonic() > deadline:
                _kill(children)
            time.sleep(0.05)
    return tuple(child.wait() for child in children)


def _kill(children: Sequence[subprocess.Popen]) -> None:
    for child in children:
        child.kill()  # nothing, where it has ended
        child.wait()


def differences(one: Path, other: Path) -> list[str]:
    """Returns how the ends of two runs differ: bits of the last checkpoint's arrays, and numbers of each update."""
    (step, sums), (step_, sums_) = map(last_sums, (one, other))
    found = [] if step == step_ else [f"the last checkpoint is of update {step_}, not {step}"]
    found += [f"{name} of the last checkpoint" for name in sums if sums[name] != sums_.get(name)]
    (numbers, problems), (numbers_, problems_) = map(recorded, (one, other))
    found += problems + problems_
    found += [f"numbers of update {update}" for update in numbers if numbers[update] != numbers_.get(update)]
    return found


def last_sums(run: Path) -> tuple[int, dict[str, str]]:
    """Returns the newest checkpoint's update and the checksum of each of its arrays."""
    steps = [int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
    record = json.loads((run / "checkpoints" / str(max(steps)) / "jaxfb" / "data.json").read_text())
    return max(steps), record["sums"]


def recorded(run: Path) -> tuple[dict[int, tuple], list[str]]:
    """Returns (loss, gradient norm) by update out of metrics.jsonl, and the updates that are missing or there twice."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "loss" in line]
    numbers = {line["step"]: (line["loss"], line["grad_norm"]) for line in updates}
    seen = [line["step"] for line in updates]
    problems = [
        f"update {step} is recorded {seen.count(step)} times"
        for step in sorted({*seen})
        if seen.count(step) > 1
    ]
    missing = sorted(set(range(1, max(seen, default=0) + 1)) - {*seen})
    return numbers, problems + [f"update {step} is not recorded" for step in missing]
