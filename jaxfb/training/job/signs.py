"""Signs of life of the processes of a job: who is lost, and who is behind where nothing moves. Pure Python."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxfb.process.position import START, Position

SLOW = 0.1  # of an update
WORDS = {
    START: "in start-up",
    "initialization": "making the state",
    "restoring": "reading the checkpoint",
    "callbacks": "in the callbacks",
    "data_wait": "reading the rows",
    "update": "starting the computation",
    "waiting": "waiting for the devices",
    "evaluation": "in the evaluation",
    "saving": "saving the state",
    "logging": "logging and in the callbacks",
    "the end": "writing the last files",
    "closing": "closing the writers of log.writers",
}


class Sign(NamedTuple):
    """A sign of life of a process: a number that grows, and its `Position` then."""

    beat: int
    phase: str
    update: int
    place: int
    ticks: int
    waits: bool
    own: float = 0.0
    whole: float = 0.0

    @classmethod
    def of(cls, beat: int, position: Position) -> Sign:
        return cls(beat, *(getattr(position, name) for name in cls._fields[1:]))

    @classmethod
    def read(cls, text: str) -> Sign:
        return cls(*json.loads(text))

    def write(self) -> str:
        return json.dumps(self)

    def __str__(self) -> str:
        where = WORDS.get(self.phase, self.phase)
        return f"{where} of update {self.update}" if self.update else where


class Signs:
    """Remembers when every process was last seen alive, and when it last moved.

    names: of the processes, such as "process 1 of 2 (node7)". index: this one.
    lost_after:  seconds without a sign. stuck_after: seconds without a step; None: never.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        lost_after: float,
        stuck_after: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._names, self._clock = index, names, clock
        self._lost_after, self._stuck_after = lost_after, stuck_after
        self._signs: dict[int, Sign] = {}
        now = clock()
        self._lived = {other: now for other in range(len(names)) if other != index}
        self._moved = dict.fromkeys(range(len(names)), now)
        self.lost: set[int] = set()  # for good: whoever counts as lost ends

    def update(self, signs: Mapping[int, Sign]) -> None:
        """Takes the newest signs, this process's own among them; who has none yet is left out."""
        now = self._clock()
        for other, sign in signs.items():
            last = self._signs.get(other)
            if last is None or sign.beat != last.beat:
                self._lived[other] = now
            if last is None or sign.ticks != last.ticks:
                self._moved[other] = now
            self._signs[other] = sign

    def sleep(self, seconds: float) -> None:
        """Takes time off in which this process was itself suspended, and so has seen nothing of the others."""
        for times in (self._lived, self._moved):
            for other in times:
                times[other] += seconds

    def who_is_lost(self) -> str | None:
        """Names the processes without a sign of life; None where all gave one."""
        now = self._clock()
        self.lost |= {
            other
            for other, since in self._lived.items()
            if other != self._index and now - since > self._lost_after
        }
        if not self.lost:
            return None
        silent = ", ".join(self._names[other] for other in sorted(self.lost))
        return (
            f"[hosts] {silent} has given no sign of life for {self._lost_after:g} s and counts as lost; "
            f"{self._names[self._index]} ends"
        )

    def who_is_stuck(self) -> str | None:
        """Names the process that all wait for, and where every one is; None while everything moves.

        A process that waits for others is not what stops them, however long it waits, unless all of them do.
        """
        if self._stuck_after is None or not self._signs:
            return None
        now = self._clock()
        still = {k: sign for k, sign in self._signs.items() if now - self._moved[k] > self._stuck_after}
        stuck = {k: sign for k, sign in still.items() if not sign.waits}
        if not stuck and len(still) < len(self._names):
            return None
        return (
            f"[hosts] nothing has moved for {self._stuck_after:g} s: {self._who_is_where(stuck or still)}; "
            f"{self._names[self._index]} ends (hosts.stuck_after is how long one step may take)"
        )

    def own_seconds(self) -> list[float] | None:
        """Returns the seconds of an update that each process spends on its own; None until all know theirs."""
        if len(self._signs) < len(self._names) or not all(sign.whole for sign in self._signs.values()):
            return None
        return [self._signs[k].own for k in range(len(self._names))]

    def who_is_slow(self) -> dict[int, str]:
        """Returns a sentence for each process for which the others wait during SLOW of an update.

        Compared is what a process does on its own; in the computation all take as long as the slowest.
        """
        seconds, found = self.own_seconds() or [], {}
        for k, own in enumerate(seconds):
            others = statistics.median([one for j, one in enumerate(seconds) if j != k] or [own])
            share = (own - others) / self._signs[k].whole
            if share > SLOW:
                found[k] = (
                    f"[hosts] {self._names[k]} is slow: rows, callbacks and logging take it {own:.3g} s an update, the "
                    f"others {others:.3g} s; all wait for it during {share:.0%} of an update"
                )
        return found

    def _who_is_where(self, stuck: Mapping[int, Sign]) -> str:
        """Returns `process 1 of 2 (b) is behind, reading the rows of update 7; process 0 of 2 (a) ...`."""
        candidates = {k: sign for k, sign in self._signs.items() if not sign.waits} or stuck
        least = min(sign.place for sign in candidates.values())
        behind = [k for k, sign in candidates.items() if sign.place == least]
        ahead = [k for k in self._signs if k not in behind]
        role = f" {'is' if len(behind) == 1 else 'are'} behind," if ahead else ""
        first = " and ".join(self._names[k] for k in behind) + f"{role} {self._signs[behind[0]]}"
        return first + "".join(f"; {self._names[k]} {self._signs[k]}" for k in ahead)
