"""Marks some cases of a test slow, so that `make test-fast` runs the others alone."""

import pytest


def some_slow(values, fast):
    """Parameters for pytest, all but those in `fast` marked slow."""
    return [pytest.param(v, id=str(v), marks=[pytest.mark.slow] * (v not in fast)) for v in values]
