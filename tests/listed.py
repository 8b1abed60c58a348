"""Marks the tests that `slow.txt` and `thorough.txt` list, one id a line.

slow: `make test-fast` leaves them out; they compute for a second or more. Where other cases of the same test are
  quick, a case may be marked in its file instead (`marks.py`).
thorough: `make test` leaves them out too, `make test-all` runs them. They are further combinations of what other cases
  show, and take long to compile.

A test that the command line names by its own id always runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LISTED = {mark: frozenset((FOLDER / f"{mark}.txt").read_text().splitlines()) for mark in ("slow", "thorough")}
STALE, FAST = pytest.StashKey[list[str]](), pytest.StashKey[set[str]]()
"""What the config keeps of the whole suite, if that was collected: listed tests that are not in it, and the functions
of which `make test-fast` runs a case. Tests look there."""


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the listed tests among `items`."""
    if any("::" in argument for argument in config.args):
        return
    there = {item.nodeid: item for item in items}
    for name, ids in LISTED.items():
        for one in ids & there.keys():
            there[one].add_marker(getattr(pytest.mark, name))
    if config.args == config.getini("testpaths"):
        config.stash[STALE] = sorted(set().union(*LISTED.values()) - there.keys())
        config.stash[FAST] = {item.nodeid.partition("[")[0] for item in items if not _is_left_out(item)}


def _is_left_out(item: pytest.Item) -> bool:
    """Returns whether `make test-fast` leaves a test out."""
    return any(item.get_closest_marker(name) for name in LISTED)
