"""Schedules by name (forward_backward step), and schedules of one's own."""

import difflib
from collections.abc import Sequence

from jaxfb.schedules.action import Action, parse_action
from jaxfb.schedules.gpipe import gpipe
from jaxfb.schedules.interleaved import interleaved
from jaxfb.schedules.one_f_one_b import one_f_one_b
from jaxfb.schedules.placement import Placement, loop_placement, v_placement
from jaxfb.schedules.render import parse_table
from jaxfb.schedules.table import Schedule
from jaxfb.schedules.v_shape import v_shape
from jaxfb.schedules.zero_bubble import zero_bubble

BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "v_shape": v_shape,
}
"""Name -> function (num_stages, num_microbatches, num_chunks) -> Schedule."""

NAMES = tuple(BUILDERS)


def make(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """A built-in schedule.

    Args:
      name: one of NAMES.
      num_stages: P, devices on the pipe axis.
      num_microbatches: M, any number from 1; it need not be a multiple of P.
      num_chunks: V, stages a device holds; the model is cut into P * V. Exactly 2 for v_shape.
    Raises:
      ValueError: an unknown name, a size below 1, or num_chunks that v_shape cannot use.
    """
    check_name(name)
    for key, value in (
        ("num_stages", num_stages),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"[schedule] {key} must be an integer of at least 1; got {key}={value!r}; use {key}=1"
            )
    return BUILDERS[name](num_stages, num_microbatches, num_chunks)


def check_name(name: str) -> None:
    """ValueError with the nearest known name."""
    if name not in BUILDERS:
        nearest = difflib.get_close_matches(str(name).lower().replace("-", "_"), NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(f"[schedule] unknown schedule {name!r}; use {nearest!r} (known: {', '.join(NAMES)})")


def from_table(
    table: Sequence[Sequence], *, name: str = "custom", placement: str | Placement = "loop"
) -> Schedule:
    """A schedule of one's own, validated.

    Args:
      table: table[tick][device] is a cell: a sequence of Actions or of strings "F3.1", one string
        "F3.1+B0.1", or None for idle. Microbatches and chunks are counted from what is in it.
      placement: "loop" (stage = chunk * P + device), "v" (0 .. P-1, then P-1 .. 0), or
      placement[device][chunk].
    Raises:
      ValueError: with the table printed and the bad cell marked.
    """
    cells = tuple(tuple(_cell(cell) for cell in row) for row in table)
    actions = [action for row in cells for cell in row for action in cell]
    if not actions:
        raise ValueError("[schedule] the table is empty; make('1f1b', 2, 4).table is an example")
    num_chunks = 1 + max(action.chunk for action in actions)
    if placement == "loop":
        placement = loop_placement(len(cells[0]), num_chunks)
    elif placement == "v":
        placement = v_placement(len(cells[0]))
    placement = tuple(tuple(row) for row in placement)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(name, len(cells[0]), num_microbatches, len(placement[0]), cells, placement).validate()


def from_text(text: str, *, name: str = "custom", placement: str | Placement = "loop") -> Schedule:
    """A schedule from text in the form that `Schedule.render` prints; `from_table` otherwise."""
    return from_table(parse_table(text), name=name, placement=placement)


def _cell(cell) -> tuple[Action, ...]:
    if isinstance(cell, str):
        cell = [part for part in cell.split("+") if part.strip(" .")]
    found = [parse_action(a) if isinstance(a, str) else Action(*a) for a in cell or ()]
    return tuple(sorted(found, key=lambda action: "FBW".find(action.kind)))
