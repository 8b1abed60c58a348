"""Whether compute hides communication, read from a scheduled program (text of `compiled.as_text()`)."""

from __future__ import annotations

import re
from collections import Counter

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = .*? ([a-z][\w-]*)\(%?([^\s,)]*)")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([^\s,)}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
MATRIX_WORK = {"dot", "convolution"}


def hidden_permutes(compiled_text: str) -> dict[str, dict[str, int]]:
    """phase of the pipeline -> how many of its collective permutes are hidden, and how many exposed.

    A permute is hidden if between its start and its done, in the order in which the device runs them, stands an
    instruction with matrix work: a dot or convolution, or a fusion, loop or branch that contains one.
    """
    bodies = _computations(compiled_text)
    works = _with_matrix_work(bodies)
    counts: dict[str, Counter] = {}
    for lines in bodies.values():
        started: dict[str, int] = {}
        work: list[bool] = []
        for index, line in enumerate(lines):
            found = _INSTRUCTION.match(line)
            work.append(
                bool(found) and (found[2] in MATRIX_WORK or any(name in works for name in _called(line)))
            )
            if not found:
                continue
            if found[2] == "collective-permute-start":
                started[found[1]] = index
            elif found[2] == "collective-permute-done":
                hidden = any(work[started[found[3]] : index])
                counts.setdefault(_phase(line), Counter())["hidden" if hidden else "exposed"] += 1
            elif found[2] == "collective-permute":
                counts.setdefault(_phase(line), Counter())["exposed"] += 1
    return {phase: {"hidden": n["hidden"], "exposed": n["exposed"]} for phase, n in sorted(counts.items())}


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if header := _COMPUTATION.match(line):
            lines = bodies.setdefault(header[1], [])
        else:
            lines.append(line)
    return bodies


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    listed = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
    return _CALLED.findall(line) + listed


def _with_matrix_work(bodies: dict[str, list[str]]) -> set[str]:
    works: set[str] = set()

    def visit(name: str, seen: frozenset) -> bool:
        if name in works:
            return True
        for line in bodies.get(name, []):
            found = _INSTRUCTION.match(line)
            direct = found and found[2] in MATRIX_WORK
            if direct or any(
                callee not in seen and visit(callee, seen | {callee}) for callee in _called(line)
            ):
                works.add(name)
                return True
        return False

    for name in bodies:
        visit(name, frozenset({name}))
    return works


def _phase(line: str) -> str:
    found = re.search(r'op_name="[^"]*?phase_([FBW]+)/', line)
    return found[1] if found else "outside"
