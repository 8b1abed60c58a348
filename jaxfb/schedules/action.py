"""Actions, the words of a schedule (forward_backward step): a device's work on a microbatch in a tick."""

import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = "FBW"
"""In the order in which one tick runs them: forward, backward, weight gradients."""


class Action(NamedTuple):
    """One chunk's work on one microbatch; `str(Action("F", 3, 1)) == "F3.1"`.

    kind "F" is a forward; "B" a backward, which is the input gradient alone where the table has "W" actions
    and input plus weight gradient where it has none; "W" a weight gradient.
    """

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


def parse_action(text: str) -> Action:
    """Reads "F3.1"; "F3" means chunk 0. ValueError if it is neither."""
    match = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"an action is F, B or W, then microbatch.chunk, such as F3.1; got {text!r}")
    kind, microbatch, chunk = match.groups()
    return Action(kind, int(microbatch), int(chunk or 0))


def parse_cell(cell: str | Sequence | None) -> tuple[Action, ...]:
    """A cell's actions in the order of KINDS, from "F3.1+B0.1", Actions, strings, or None for idle."""
    if isinstance(cell, str):
        cell = [part for part in cell.split("+") if part.strip(" .")]
    found = [parse_action(a) if isinstance(a, str) else Action(*a) for a in cell or ()]
    return tuple(sorted(found, key=lambda action: KINDS.find(action.kind)))
