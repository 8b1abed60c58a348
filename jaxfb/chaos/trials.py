"""The trials: each makes one fault happen to a run and reports the result."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from jaxfb.chaos.jobs import JOBS, TRAIN, Job
from jaxfb.chaos.runs import Laboratory, differences
from jaxfb.process.exit_codes import DONE, FAULTY, GAVE_UP
from jaxfb.process.fault_points import POINTS

DIED = -9
ONCE = "guard.verify_every=null"
"""Whatever a user's overrides ask for: computed twice, an update would be put right before another guard sees the
fault."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial. problems: what should not have happened; empty if nothing. note: a line to print."""

    trial: str
    problems: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """A fault to try. name: unique. run: laboratory -> outcome."""

    name: str
    run: Callable[[Laboratory], Outcome]


def kill(point: str, count: int, job: Job = TRAIN, process: int = 0) -> Trial:
    """Makes a trial in which a process dies at a point; resumed, its run must end in the bits of the reference."""
    where = f" of {process}" if job.processes > 1 else ""
    shown = f"kill {job.name} {point}:{count}{where}"

    def run(anywhere: Laboratory) -> Outcome:
        laboratory, name, problems = anywhere.of(job), f"kill-{point}-{count}-{process}", []
        more = local_tier(laboratory.path(f"{name}-disk")) if point.startswith("local") else ()
        if point.startswith("restore"):
            laboratory.run(name, kill="save.done:1")
        died = laboratory.run(name, kill=f"{point}:{count}", process=process, more=more)
        if died.code == DONE:
            return Outcome(shown, (), "not reached: the run was over before")
        if died.codes[process] != DIED:
            return Outcome(
                shown, (f"exit code {died.codes[process]}, not {DIED}: {_last_line(died.output)}",)
            )
        again = laboratory.run(name, more=more)
        if again.code:
            problems.append(
                f"started again, it ended with exit code {again.code}: {_last_line(again.output)}"
            )
        else:
            problems += differences(laboratory.reference, laboratory.path(name))
        return Outcome(shown, tuple(problems), _continued(again.output))

    return Trial(shown, run)


def _continued(output: str) -> str:
    """Returns where a run that was started again continued, by what it has printed."""
    if found := re.search(r"resuming .* after update (\d+)", output):
        return f"resumed after update {found[1]}"
    return "began again at update 0" if "no checkpoint in" in output else "it printed no beginning"


def local_tier(disk: Path) -> tuple[str, ...]:
    """Returns overrides with which a run saves on its own disk between two checkpoints."""
    return (f"checkpoint.local.dir={disk}", "checkpoint.local.every=1")


def flipped_bit(seed: int) -> Trial:
    """Makes a trial in which one bit of the newest checkpoint flips; no other arrays than saved ones may come back."""

    def run(laboratory: Laboratory) -> Outcome:
        from jaxfb.chaos.restoring import restored

        source = laboratory.reference / "checkpoints"
        target = laboratory.path("flipped") / "checkpoints"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        where = flip_one_bit(_newest(target), np.random.default_rng(seed))
        step, sums, saved = restored(laboratory, target)
        problems = () if sums == saved[step] else (f"restored other arrays than were saved: {where}",)
        return Outcome(f"flip {seed}", problems, f"{where}: update {step} restored")

    return Trial(f"flip {seed}", run)


def fault(name: str, overrides: tuple[str, ...], code: int, sentence: str, same_end: bool = False) -> Trial:
    """Makes a trial of one of `FAULTS`: the run must end with that exit code and print a sentence that matches.

    same_end: and its end must be that of a run without the fault.
    """

    def run(laboratory: Laboratory) -> Outcome:
        ended = laboratory.run(name, fault=name, more=overrides)
        problems = (
            [] if ended.code == code else [f"exit code {ended.code}, not {code}: {_last_line(ended.output)}"]
        )
        found = re.search(sentence, ended.output)
        problems += [] if found else [f"no sentence like {sentence!r}"]
        if same_end and not problems:
            problems += differences(laboratory.reference, laboratory.path(name))
        return Outcome(name, tuple(problems), found[0] if found else "")

    return Trial(f"fault {name}", run)


def kills(number: int) -> Iterator[Trial]:
    """Yields so many kills: every job at every point the first time that it gets there, then the second time, ..."""
    yield from islice(cycle(_all_kills()), number)


def _all_kills() -> Iterator[Trial]:
    for count in range(1, max(max(job.times.values()) for job in JOBS) + 1):
        for job in JOBS:
            points = [point for point in POINTS if count <= job.times.get(point, 0)]
            points.sort(key=lambda point: not point.startswith("rollout"))  # few kills reach these too
            for index, point in enumerate(points):
                # of several processes, process 0 renames
                process = 0 if point == "save.renaming" else (index + count) % job.processes
                yield kill(point, count, job, process)


def faults() -> Iterator[Trial]:
    """Returns one trial of every fault that a process makes to itself."""
    few = ("run.max_nonfinite=2", ONCE)
    yield fault("nan_in_parameters", few, GAVE_UP, r"not finite in parameter .*jaxfb replay")
    twice = ("guard.verify_every=1",)
    yield fault("wrong_once", twice, DONE, r"a third run agreed with one of them", same_end=True)
    yield fault("wrong_again_and_again", twice, DONE, r"the program is not deterministic")
    sensitive = ("guard.spike_window=8", "guard.spike_threshold=4", "guard.spikes=rollback", ONCE)
    yield fault("spike", sensitive, DONE, r"rolled back to the state of update \d+")


def faults_of_copies() -> Iterator[Trial]:
    """Returns the faults that need several devices with copies."""
    often = ("guard.compare_replicas_every=2", ONCE)
    yield fault("one_copy_differs", often, FAULTY, r"copies that must be equal differ")


def flip_one_bit(directory: Path, draw: np.random.Generator) -> str:
    """Flips one bit of one file below a directory, bytes of all files being equally likely; returns where."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = np.array([path.stat().st_size for path in files])
    place = int(draw.integers(sizes.sum()))
    index = int(np.searchsorted(sizes.cumsum(), place, side="right"))
    offset, bit = place - int(sizes[:index].sum()), int(draw.integers(8))
    content = bytearray(files[index].read_bytes())
    content[offset] ^= 1 << bit
    files[index].write_bytes(content)
    return f"bit {bit} of byte {offset} of {files[index].relative_to(directory)}"


def _newest(checkpoints: Path) -> Path:
    return max(
        (path for path in checkpoints.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
