"""Adds up where the wall time of a run goes, over all of its starts: applied updates, and everything else by cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

CAUSES = {
    "updates": "applied updates",
    "skipped": "updates that changed nothing",
    "compile": "compilation and first updates",
    "start_up": "start-up",
    "data": "waiting for rows",
    "evaluation": "evaluation",
    "saving": "saving",
    "callbacks": "callbacks and logging",
    "lost": "work done again and time away after a restart",
    "other": "other",
}
OF_PHASE = {"data_wait": "data", "logging": "callbacks"}  # others have their own name


class Goodput:
    """Keeps seconds by cause (`CAUSES`) from the first start of a run to now; a checkpoint continues them.

    began: when this process started the run, in seconds since 1970, as `clock` counts.
    """

    def __init__(self, began: float, clock: Callable[[], float]):
        self._clock, self._began, self._first = clock, began, began
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._updates = 0  # in this process

    def start(self) -> None:
        """Ends the start-up: the first update of this process is next."""
        self._seconds["start_up"] += self._clock() - self._began

    def add(self, phases: Mapping[str, float], skipped: bool) -> None:
        """Adds the seconds of one update, and of what was done since the one before, by phase."""
        self._updates += 1
        self._add(phases, "compile" if self._updates == 1 else "skipped" if skipped else "updates")

    def end(self, phases: Mapping[str, float]) -> None:
        """Adds the seconds of what was done after the last update."""
        self._add(phases, "other")

    def _add(self, phases: Mapping[str, float], computed: str) -> None:
        for phase, seconds in phases.items():
            cause = computed if phase in ("update", "waiting") else OF_PHASE.get(phase, phase)
            self._seconds[cause] += seconds

    def save(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"first": self._first, "saved": self._clock(), "seconds": dict(self._seconds)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues the seconds of a checkpoint; those between its save and this start are lost.

        How many they are is not known where the clock was set back in between; they count as none.
        """
        away = max(0.0, self._began - saved["saved"])
        self._first = self._began - away - (saved["saved"] - saved["first"])
        for cause, seconds in saved["seconds"].items():
            self._seconds[cause] += seconds
        self._seconds["lost"] += away

    @property
    def share(self) -> float:
        """Returns the share of the wall time since the first start that applied updates took."""
        whole = self._clock() - self._first
        return self._seconds["updates"] / whole if whole > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """Returns {"share": of applied updates, "seconds": by cause}, which add up to the wall time."""
        rest = self._clock() - self._first - sum(self._seconds.values())
        seconds = {**self._seconds, "other": max(0.0, rest)}
        rounded = {cause: round(value, 2) for cause, value in seconds.items() if value >= 0.005}
        return {"share": round(self.share, 4), "seconds": rounded}

    def __str__(self) -> str:
        found = self.summary()
        rest = {cause: seconds for cause, seconds in found["seconds"].items() if cause != "updates"}
        most = sorted(rest.items(), key=lambda item: -item[1])
        words = ", ".join(f"{CAUSES[cause]} {seconds:.1f} s" for cause, seconds in most)
        return f"time: {found['share']:.1%} in applied updates (goodput); the rest is {words}"
