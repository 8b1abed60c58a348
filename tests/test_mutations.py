"""Mistakes made on purpose: each is still possible where it is listed, and the test that notices it is there."""

import ast
import random
import re

import pytest
from mutations import MUTATIONS, ROOT, outcome

AREAS = (
    "schedules",
    "batch_plan",
    "forward_backward",
    "parallel",
    "losses",
    "optim",
    "data",
    ("checkpoint", "manifest"),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mistake_can_still_be_made_where_it_is_listed(mutation):
    changed = mutation.applied(mutation.path.read_text())
    ast.parse(changed)
    file, _, function = mutation.test.partition("::")
    text = (ROOT / "tests" / file).read_text()
    found = re.search(rf"((?:^@[^\n]*\n(?:[ )\]][^\n]*\n)*)*)^def {function}\(", text, re.MULTILINE)
    assert found, f"{mutation.test} is not there"
    assert "pytest.mark.slow" not in found.group(1), f"{mutation.test} is slow; a fast test must notice it"


def test_every_part_of_the_engine_has_mistakes():
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS) >= 27
    for area in AREAS:
        assert sum(one.file.startswith(area) for one in MUTATIONS) >= 2, area


def some(count: int) -> list:
    """A few mutations, others with every change of the package; `python -m tests.mutations` runs all."""
    text = "".join(path.read_text() for path in sorted((ROOT / "jaxfb").rglob("*.py")))
    return random.Random(text).sample(MUTATIONS, count)


@pytest.mark.slow
@pytest.mark.processes
def test_a_mistake_is_noticed():
    found = {one.name: outcome(one) for one in some(4)}
    assert set(found.values()) == {"caught"}, found
