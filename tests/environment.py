"""Puts the environment variables of a process back as they were."""

import os
from collections.abc import Mapping


def restore(before: Mapping[str, str]) -> None:
    """Sets and removes only what has changed: while one variable is set, a thread of XLA that reads any can crash."""
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
