"""Actions, the words of a schedule: a device's work on a microbatch in a tick."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxfb.refusal import Refused, integer, shown

Table = tuple[tuple[tuple["Action", ...], ...], ...]

_MOST_MISSING = 10_000

KINDS = "FBW"
"""In the order in which one tick runs them: forward, backward, weight gradients."""


class Action(NamedTuple):
    """Names the work of one chunk on one microbatch: a forward, a backward or a weight gradient.

    `str(Action("F", 3, 1)) == "F3.1"`.

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
    match = re.fullmatch(r"([FBW])([0-9]{1,9})(?:\.([0-9]{1,9}))?", text.strip())
    if match is None:
        raise Refused(
            f"[schedule] an action of a table is F, B or W, then microbatch.chunk, such as F3.1; got {shown(text)}"
        )
    kind, microbatch, chunk = match.groups()
    return Action(kind, int(microbatch), int(chunk or 0))


def parse_cell(cell: str | Sequence | None) -> tuple[Action, ...]:
    """Returns a cell's actions in the order of KINDS, from "F3.1+B0.1", Actions, strings, or None for idle."""
    if isinstance(cell, str):
        cell = cell.split("+") if cell.strip(" .") else []
    if cell is not None and not isinstance(cell, list | tuple):
        raise Refused(
            f"[schedule] a cell of a table is a list of actions, a string or None, got {shown(cell)}"
        )
    found = [parse_action(a) if isinstance(a, str) else _checked(a) for a in cell or ()]
    return tuple(sorted(found, key=lambda action: KINDS.find(action.kind)))


def cells_of_table(table: Any) -> Table:
    """Returns table[tick][device] as tuples of Actions; ValueError if it is not a table or has no action."""
    if not isinstance(table, list | tuple) or not all(isinstance(row, list | tuple) and row for row in table):
        raise Refused(
            f"[schedule] a table is a list of ticks, each a list of cells by device, got {shown(table)}"
        )
    cells = tuple(
        tuple(cell_at(device, tick, cell) for device, cell in enumerate(row))
        for tick, row in enumerate(table)
    )
    actions = [action for row in cells for cell in row for action in cell]
    if not actions:
        raise Refused("[schedule] the table is empty; make('1f1b', 2, 4).table is an example")
    microbatches = 1 + max(action.microbatch for action in actions)
    chunks = 1 + max(action.chunk for action in actions)
    if microbatches * chunks > len(actions) + _MOST_MISSING:
        raise Refused(
            f"[schedule] the table has microbatches up to {microbatches - 1} and chunks up to {chunks - 1}, but only "
            f"{len(actions)} actions; each microbatch and chunk from 0 on must have its own"
        )
    return cells


def cell_at(device: int, tick: int, cell: Any) -> tuple[Action, ...]:
    """Returns the actions of a cell of a table; a refusal names the device and the tick."""
    try:
        return parse_cell(cell)
    except Refused as error:
        raise Refused(f"{error} on device {device} in tick {tick}") from None


def _checked(action: Any) -> Action:
    is_triple = isinstance(action, list | tuple) and len(action) == 3 and isinstance(action[0], str)
    if not is_triple:
        raise Refused(
            f'[schedule] an action of a table is an Action(kind, microbatch, chunk) or a string such as "F3.1", '
            f"got {shown(action)}"
        )
    kind, *numbers = action
    names = ("microbatch of an action of the table", "chunk of an action of the table")
    return Action(
        kind, *(integer(name, n, who="[schedule]", least=0) for name, n in zip(names, numbers, strict=True))
    )
