"""Listed tests are marked thorough, unless the command line names a test, and a list with stale names is refused."""

from types import SimpleNamespace

import pytest
import thorough

LISTED, OTHER = sorted(thorough.LISTED)[0], "tests/test_thorough.py::other"


def marked(args, ids):
    """Returns the ids of the tests that `mark` marks; args: those of pytest's command line."""
    found = []
    items = [SimpleNamespace(nodeid=one, add_marker=lambda _, one=one: found.append(one)) for one in ids]
    thorough.mark(SimpleNamespace(args=args, getini=lambda name: ["tests"]), items)
    return found


def test_listed_tests_are_marked_and_no_others():
    assert marked(["tests/models"], [OTHER, LISTED]) == [LISTED]
    assert marked(["tests"], [OTHER, *sorted(thorough.LISTED)]) == sorted(thorough.LISTED)


def test_a_test_that_is_named_runs():
    assert marked([LISTED], [LISTED]) == []


def test_a_listed_test_that_is_not_in_the_whole_suite_is_refused():
    with pytest.raises(pytest.UsageError, match="names tests that are not there"):
        marked(["tests"], [OTHER])
