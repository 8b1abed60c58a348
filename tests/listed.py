"""Marks the tests that `slow.txt` and `thorough.txt` list, one id a line.

slow: `make test-fast` leaves them out; they compute for more than two seconds. Where other cases of the same test are
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


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the listed tests among `items`.

    Raises:
      pytest.UsageError: the whole suite was collected, and a listed test is not in it.
    """
    if any("::" in argument for argument in config.args):
        return
    for name, ids in LISTED.items():
        listed = [item for item in items if item.nodeid in ids]
        for item in listed:
            item.add_marker(getattr(pytest.mark, name))
        if config.args == config.getini("testpaths") and (missing := ids - {item.nodeid for item in listed}):
            raise pytest.UsageError(
                f"tests/{name}.txt names tests that are not there: {', '.join(sorted(missing))}"
            )
