"""Counts how often the ticks of a pipeline take each of their branches: a program contains a branch, not how often it
is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxfb.hlo import Instruction
from jaxfb.schedules import Program

EVENTS = ("embed", "loss", "embed_gradient")
"""What all devices do together, or none does."""
_SCOPES = re.compile(rf'op_name="[^"]*/phase_([FBW]+)/[^"]*?\b([FBW]|{"|".join(EVENTS)})/cond(?![^"]*/cond)')


class Branch(NamedTuple):
    """A branch of a tick: the kinds of its phase, and "F", "B", "W" or one of `EVENTS`."""

    phase: str
    what: str


def branch_of(instruction: Instruction) -> Branch | None:
    """Returns which branch of a tick a conditional is, by the scopes in its `op_name`; None for every other one."""
    if instruction.opcode != "conditional" or not (found := _SCOPES.search(instruction.rest)):
        return None
    return Branch(*found.groups())


class TakenBranches:
    """Knows in which ticks of a program each branch is taken, and by which device."""

    def __init__(self, program: Program):
        self._program = program

    def share(self, branch: Branch, seconds: Mapping[str, float]) -> float | None:
        """Returns in which share of its phase's ticks a branch is taken; None where the program has no such branch.

        By device it is that of the device that has most to do in each tick, since all others wait for it.

        seconds: that F, B and W take, where they are branches.
        """
        if branch.what in EVENTS:
            return _mean(self._sometimes(branch))
        if not self._program.by_device or branch.what not in seconds:
            return None
        return _mean(self._on_the_busiest(branch, seconds))

    def _sometimes(self, branch: Branch) -> Iterator[np.ndarray]:
        """Yields [ticks] of each phase that needs the branch: an event of every tick, or of none, needs none."""
        for rows in self._rows(branch.phase):
            valid = np.asarray(rows[f"{branch.what}_valid"]) == 1
            if valid.any() and not valid.all():
                yield valid

    def _on_the_busiest(self, branch: Branch, seconds: Mapping[str, float]) -> Iterator[np.ndarray]:
        for rows in self._rows(branch.phase):
            valid = {kind: np.asarray(rows[f"{kind.lower()}_valid"]) == 1 for kind in seconds}
            busiest = np.sum([seconds[kind] * valid[kind] for kind in seconds], 0).argmax(1)
            yield np.take_along_axis(valid[branch.what], busiest[:, None], 1)[:, 0]

    def _rows(self, kinds: str) -> Iterator[dict[str, list]]:
        for phase in self._program.phases:
            if phase.kinds == kinds:
                yield self._program.phase_rows(phase)


def _mean(ticks: Iterator[np.ndarray]) -> float | None:
    found = list(ticks)
    return float(np.concatenate(found).mean()) if found else None
