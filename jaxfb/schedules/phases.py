"""Static phases of a table: the executor makes one scan of each.

Inside a phase the body is the same in every tick: it runs every kind of the phase on every device, valid or
not. That is what a tick costs, so phases are what `simulate` charges.
"""

from itertools import groupby
from typing import NamedTuple

from jaxfb.schedules.action import KINDS

MAX_PHASES = 6
"""Keeps compile time independent of the number of microbatches, whatever the table looks like."""


class Phase(NamedTuple):
    """Spans ticks start .. stop - 1; `kinds` are the letters of what devices execute in them, such as "FB"."""

    start: int
    stop: int
    kinds: str

    @property
    def num_ticks(self) -> int:
        """Returns stop - start."""
        return self.stop - self.start


def one_phase_of(table) -> tuple[Phase, ...]:
    """Returns all ticks as one phase."""
    kinds = {action.kind for row in table for cell in row for action in cell}
    return (Phase(0, len(table), _union("".join(kinds))),)


def phases_of(table) -> tuple[Phase, ...]:
    """Runs of ticks with equal kinds; of an irregular table the cheapest at most MAX_PHASES merged runs."""
    runs = _runs(
        ["".join(k for k in KINDS if any(a.kind == k for cell in row for a in cell)) for row in table]
    )
    return tuple(runs if len(runs) <= MAX_PHASES else _merge(runs))


def _runs(kinds_by_tick: list[str]) -> list[Phase]:
    runs = groupby(range(len(kinds_by_tick)), kinds_by_tick.__getitem__)
    ticks = ((kinds, [*run]) for kinds, run in runs)
    return [Phase(run[0], run[-1] + 1, kinds) for kinds, run in ticks]


def _merge(runs: list[Phase]) -> list[Phase]:
    """Finds the fewest executed kinds over all partitions into MAX_PHASES stretches (dynamic programming)."""
    best: list[tuple[int, list[Phase]]] = [(0, [])] + [
        (_cost(p := _join(runs[:j])), [p]) for j in range(1, len(runs) + 1)
    ]
    for _ in range(MAX_PHASES - 1):
        longer = [best[0]]
        for stop in range(1, len(runs) + 1):
            kinds, found = "", best[stop]
            for start in range(stop - 1, 0, -1):
                kinds = kinds + runs[start].kinds
                last = Phase(runs[start].start, runs[stop - 1].stop, _union(kinds))
                if best[start][0] + _cost(last) < found[0]:
                    found = (best[start][0] + _cost(last), [*best[start][1], last])
            longer.append(found)
        best = longer
    return best[-1][1]


def _union(kinds: str) -> str:
    return "".join(k for k in KINDS if k in kinds)


def _join(runs: list[Phase]) -> Phase:
    return Phase(runs[0].start, runs[-1].stop, _union("".join(run.kinds for run in runs)))


def _cost(phase: Phase) -> int:
    return phase.num_ticks * len(phase.kinds)
