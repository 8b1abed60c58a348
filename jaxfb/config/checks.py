"""Checks of one value of a config, which the sections share. Plain Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfb.refusal import Refused, shown


def seed_in_range(section: str, seed: int) -> None:
    """Refuses a seed that JAX would take modulo 2**32, and so for another one."""
    if not 0 <= seed < 2**32:
        raise Refused(
            f"[{section}] seed={seed} must lie in [0, 2**32); use {seed % 2**32}", [{"seed": seed % 2**32}]
        )


def directory_is_named(section: str, directory: str) -> None:
    """Refuses an empty name, which would be the working directory, and one that `load_config` would not take."""
    if not directory.strip():
        raise Refused(
            f"[{section}] dir={directory!r} must not be empty; use runs/NAME", [{"dir": "runs/NAME"}]
        )
    if not directory.isprintable():
        raise Refused(
            f"[{section}] dir={shown(directory)} must be of printable characters; use runs/NAME",
            [{"dir": "runs/NAME"}],
        )


def expand_home(section: Any, *names: str) -> None:
    """Replaces "~" at the beginning of paths of a frozen section by the home directory, which no shell does in YAML."""
    for name in names:
        if (path := getattr(section, name)) is not None:
            object.__setattr__(section, name, os.path.expanduser(path))


def positive(section: str, **values: Any) -> None:
    """Refuses numbers that are not above 0; None is not given and passes."""
    for name, value in values.items():
        if value is not None and not 0 < value < float("inf"):
            least = "1" if isinstance(value, int) else "a number above 0"
            raise Refused(f"[{section}] {name}={value} must be positive and finite; use {least}", [{name: 1}])


def one_length(
    section: str, names: Sequence[str], given: Mapping[str, Any], usual: Mapping[str, Any]
) -> None:
    """Refuses a length of a run that is not given by exactly one of `names`.

    given: those that are. usual: the value to offer where there is none.
    """
    if len(given) == 1:
        return
    values = ", ".join(f"{name}={value}" for name, value in given.items()) or "none"
    choices = [{other: None for other in given if other != name} for name in reversed([*given])] or [usual]
    words = (
        " and ".join(f"{section}.{name}={value or 'null'}" for name, value in one.items()) for one in choices
    )
    raise Refused(
        f"[{section}] the length is given by exactly one of {', '.join(names)}; got {values}; "
        f"set {' or '.join(words)}",
        choices,
    )


def at_least_zero(section: str, **values: Any) -> None:
    """Refuses negative and infinite numbers; None is not given and passes."""
    for name, value in values.items():
        if value is not None and not 0 <= value < float("inf"):
            raise Refused(
                f"[{section}] {name}={value} must not be negative or infinite; use 0 or more", [{name: 0}]
            )


def not_empty(section: str, **texts: str | None) -> None:
    """Refuses an empty text for a path, which would be the working directory or nothing; None is not given and
    passes.
    """
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise Refused(
                f"[{section}] {name}={text!r} must not be empty; use {section}.{name}=null, or a path",
                [{name: None}],
            )
