"""Listed tests get the list's mark, unless the command line names a test, and the lists name only tests that exist."""

from types import SimpleNamespace

import listed
import pytest
from mutations import MUTATIONS

ALL = sorted((one, mark) for mark, ids in listed.LISTED.items() for one in ids)
(LISTED, MARK), OTHER = ALL[0], "tests/test_listed.py::other"


def marked(args, ids):
    """Returns (id, mark) of the tests that `mark` marks; args: those of pytest's command line."""
    found = []
    items = [
        SimpleNamespace(
            nodeid=one,
            add_marker=lambda mark, one=one: found.append((one, mark.name)),
            get_closest_marker=lambda name: None,
        )
        for one in ids
    ]
    listed.mark(config_of(args), items)
    return sorted(found)


def config_of(args):
    return SimpleNamespace(args=args, getini=lambda name: ["tests"], stash=pytest.Stash())


def test_listed_tests_are_marked_and_no_others():
    assert marked(["tests/models"], [OTHER, LISTED]) == [(LISTED, MARK)]
    assert marked(["tests"], [OTHER, *(one for one, _ in ALL)]) == ALL


def test_no_test_is_in_both_lists():
    assert not listed.LISTED["slow"] & listed.LISTED["thorough"]


def test_a_test_that_is_named_runs():
    assert marked([LISTED], [LISTED]) == []


def test_a_listed_test_that_is_not_in_the_whole_suite_is_stale():
    config = config_of(["tests"])
    listed.mark(config, [])
    assert config.stash[listed.STALE] == [one for one, _ in ALL]


def test_the_lists_name_only_tests_that_exist(request):
    assert request.config.stash.get(listed.STALE, []) == []


def test_a_fast_case_notices_each_mistake_made_on_purpose(request):
    named = {f"tests/{one.test}" for one in MUTATIONS}
    assert sorted(named - request.config.stash.get(listed.FAST, named)) == []
