"""Collects the results of a search and writes counts, refusals and findings. No JAX in here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.outcome import FINDINGS, REFUSED, SAME, Outcome
from jaxfb.checking.program import program

STATUSES = (SAME, REFUSED, *FINDINGS)


@dataclass(frozen=True)
class Result:
    """Pairs a case with its outcome. index: of the case in its seed. smallest: the simplest that shows a finding."""

    index: int
    case: Case
    outcome: Outcome
    smallest: Case | None = None

    def __str__(self) -> str:
        """Writes two lines: the case and its outcome."""
        first = str(self.outcome).partition("\n")[0]
        return f"{self.index:5d}  {self.outcome.seconds:5.1f} s  {self.case}\n{'':16}{first}"


@dataclass(frozen=True)
class Found:
    """Collects all results of a search, in the order of their cases; prints as a table, refusals and findings.

    model: where the user's came from, "module:function"; None without one, or where it was handed over itself.
    """

    results: tuple[Result, ...]
    seed: int = 0
    model: str | None = None
    seconds: float = field(compare=False, default=0.0)

    @property
    def findings(self) -> tuple[Result, ...]:
        """Returns those in which something is wrong with jaxfb."""
        return tuple(one for one in self.results if one.outcome.is_finding)

    def raise_if_found(self) -> None:
        """Raises AssertionError with the whole text if anything was found, or if every case was refused."""
        if self.findings or all(one.outcome.status == REFUSED for one in self.results):
            raise AssertionError(str(self))

    def __str__(self) -> str:
        counted = Counter(one.outcome.status for one in self.results)
        counts = ", ".join(f"{counted[status]} {status}" for status in STATUSES if counted[status])
        title = f"{len(self.results)} cases of seed {self.seed} in {self.seconds:.0f} s: {counts}"
        parts = [title, _table(self.results), *_refusals(self.results)]
        return "\n\n".join([*parts, *(_finding(one, self) for one in self.findings)])


def _table(results: Iterable[Result]) -> str:
    """Counts the cases of each kind, those that were refused or found something, and names the worst difference."""
    kinds: dict[str, list[Result]] = {}
    for result in results:
        for kind in _kinds(result.case):
            kinds.setdefault(kind, []).append(result)
    lines = [f"{'':28}{'cases':>6}{'same':>6}{'refused':>8}{'found':>6}  largest difference / allowed"]
    for kind in sorted(kinds):
        of_kind = kinds[kind]
        status = Counter(one.outcome.status for one in of_kind)
        wrong = sum(one.outcome.is_finding for one in of_kind)
        largest = max(one.outcome.largest for one in of_kind)
        counts = f"{len(of_kind):6}{status[SAME]:6}{status[REFUSED]:8}{wrong:6}"
        lines.append(f"{kind:28}{counts}  {largest:.0e}")
    return "\n".join(lines)


def _kinds(case: Case) -> list[str]:
    kinds = [f"axis {axis}" for axis in case.mesh] or ["axis none"]
    kinds += [f"model {case.model}", f"normalize {case.normalize}", f"computes in {case.computes_in}"]
    kinds += [f"schedule {case.schedule}"] if case.schedule else []
    return kinds + ([f"update {case.optimizer}"] if case.update else [])


def _refusals(results: Iterable[Result]) -> list[str]:
    refused = [one for one in results if one.outcome.status == REFUSED]
    lines = [f"{one.index:5d}  {one.case}\n       {one.outcome.detail}" for one in refused]
    return ["\n".join(["refused:", *lines])] if lines else []


def _finding(result: Result, found: Found) -> str:
    smallest = result.smallest or result.case
    flags = os.environ.get("XLA_FLAGS", "").strip()
    lines = [
        f"FOUND in case {result.index}: {result.case}",
        str(result.outcome),
        f"a smaller case that shows it: {smallest}",
        f"to run it again: --random 1 --seed {found.seed} --first {result.index}",
        "",
        program(smallest, result.outcome, flags, found.model),
    ]
    return "\n".join(lines)
