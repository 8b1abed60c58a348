"""Starts runs in separate processes, with a fault or without, and compares how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxfb.fault_points import VARIABLE

CONFIG = "quickstart"
SMALL = tuple(
    """model.num_layers=2 model.hidden_size=32 model.num_heads=2 model.num_kv_heads=1
    data.tokenizer=bytes data.sequence_length=32 data.max_bytes=60000 data.held_out_fraction=0.1
    batch.rows=16 batch.num_microbatches=2 run.updates=12 lr.warmup=2 lr.final=0 log.every=1
    eval.every=4 eval.batches=1 eval.rows=8 eval.rows_per_microbatch=2 eval.prompt= checkpoint.every=4
    optimizer.name=adamw optimizer.learning_rate=0.01""".split()
)
"""What makes CONFIG a run of seconds."""


@dataclass(frozen=True)
class Ended:
    """The way a process ended, and what it wrote."""

    code: int
    output: str


@dataclass(frozen=True)
class Laboratory:
    """Runs of one small config, each in its own directory below `directory`.

    overrides: of all runs, beside SMALL. limit: seconds for one run.
    """

    directory: Path
    overrides: tuple[str, ...] = ()
    limit: float = 600.0

    def run(self, name: str, fault: str = "", kill: str = "", more: Sequence[str] = ()) -> Ended:
        """Trains into the directory `name`, from its newest checkpoint if it has one.

        Args:
          fault: the name of one of `faults.FAULTS`, made inside the process; "" makes none.
          kill: "point:count" of `fault_points`, where the process dies; "": nowhere.
          more: further overrides.
        """
        where = (f"run.dir={self.path(name)}", f"data.cache_dir={self.directory / 'data'}")
        arguments = ("train", CONFIG, *SMALL, *self.overrides, *where, *more, "--resume")
        program = [sys.executable, "-m", "jaxfb.chaos.worker", fault or "-", *arguments]
        done = subprocess.run(
            program, env=self._environment(kill), capture_output=True, text=True, timeout=self.limit
        )
        return Ended(done.returncode, done.stdout + done.stderr)

    def path(self, name: str) -> Path:
        """Returns the directory of that run."""
        return self.directory / name

    @cached_property
    def reference(self) -> Path:
        """Returns the run that nothing happens to; made at the first use."""
        ended = self.run("reference")
        if ended.code:
            raise RuntimeError(f"the run without a fault ended with exit code {ended.code}: {ended.output}")
        return self.path("reference")

    def _environment(self, kill: str) -> Mapping[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        return {**environment, **({VARIABLE: kill} if kill else {})}


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
