"""Marks the tests that `thorough.txt` lists, one id a line: `make test` leaves them out, `make test-all` runs them.

They are further combinations of what other cases show, and take long to compile. A test that the command line names by
its own id always runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LISTED = frozenset((Path(__file__).parent / "thorough.txt").read_text().splitlines())


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the listed tests among `items`.

    Raises:
      pytest.UsageError: the whole suite was collected, and a listed test is not in it.
    """
    if any("::" in argument for argument in config.args):
        return
    listed = [item for item in items if item.nodeid in LISTED]
    for item in listed:
        item.add_marker(pytest.mark.thorough)
    if config.args == config.getini("testpaths") and (missing := LISTED - {item.nodeid for item in listed}):
        raise pytest.UsageError(
            f"tests/thorough.txt names tests that are not there: {', '.join(sorted(missing))}"
        )
