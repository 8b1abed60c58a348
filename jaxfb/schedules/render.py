"""Schedules as text: printed, read back, and in errors with a bad cell marked."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxfb.refusal import Refused, instance, integer, shown
from jaxfb.schedules.action import KINDS, Action, cell_at
from jaxfb.schedules.placement import placement_of

_MOST_IDLE = 1_000_000

BY_DEVICE = "each device computes its own cell"

Mark = tuple[int, int, str]
"""(tick, device, kind) of a cell to mark."""


def render(schedule, *, width: int = 120, mark: Mark | None = None) -> str:
    """Returns a title, then blocks of ticks; a line for each device and kind, "." is idle, "|" separates phases."""
    integer("width", width, who="[schedule]")
    title = f"{headline(schedule)}{_placement(schedule)}; {BY_DEVICE if schedule.by_device else _phases(schedule)}"
    starts = {phase.start for phase in schedule.phases if phase.start}
    return "\n".join([title, *render_table(schedule.table, width=width, mark=mark, separators=starts)])


def _phases(schedule) -> str:
    phases = [f"{'+'.join(p.kinds) or 'idle'} {p.start}-{p.stop - 1}" for p in schedule.phases]
    return f"phases {', '.join(phases)}"


def titled(text: str) -> dict[str, Any]:
    """Returns what the title of a printed table contains beside the sizes: options of `Schedule.from_table`."""
    placement = re.search(r", placement (v|\[\[[\d, \[\]]+\]\])", text)
    pieces = re.search(r"\d microbatches in (\d{1,9}) pieces", text)
    found = placement[1] if placement else "loop"
    return {
        "by_device": any(line.rstrip().endswith(BY_DEVICE) for line in text.splitlines()),
        "placement": json.loads(found) if found.startswith("[") else found,
        "num_pieces": int(pieces[1]) if pieces else 1,
    }


def headline(schedule) -> str:
    """Returns name and sizes, such as "1f1b: 4 devices x 1 chunk, 8 microbatches, 14 ticks"."""
    chunks = "1 chunk" if schedule.num_chunks == 1 else f"{schedule.num_chunks} chunks"
    devices = f"{schedule.num_stages} device" + "s" * (schedule.num_stages > 1)
    sizes = f"{devices} x {chunks}, {schedule.num_microbatches} microbatches"
    if schedule.num_pieces > 1:
        sizes += f" in {schedule.num_pieces} pieces"
    return f"{schedule.name}: {sizes}, {schedule.num_ticks} ticks"


def _placement(schedule) -> str:
    """Returns the placement as words, none for that which a table without a title has."""
    sizes = schedule.num_stages, schedule.num_chunks
    if schedule.placement == placement_of("loop", *sizes):
        return ""
    is_v = schedule.num_chunks == 2 and schedule.placement == placement_of("v", *sizes)
    return f", placement {'v' if is_v else json.dumps(schedule.placement)}"


def render_table(
    table: Sequence, *, width: int = 120, mark: Mark | None = None, separators: set[int] | None = None
) -> list[str]:
    """Returns lines of the table alone; with a mark, only the ticks around it."""
    there = {a.kind for row in table for cell in row for a in cell} | ({mark[2]} if mark else set())
    kinds = [k for k in KINDS if k in there] or ["F"]
    cell_width = max((len(str(a)) for row in table for cell in row for a in cell), default=4) + (
        3 if mark else 0
    )
    label = len(f"device {len(table[0]) - 1} {kinds[0]}")
    columns = max(1, (width - label) // (cell_width + 2) - 1)
    first = max(0, mark[0] - columns // 2) if mark else 0
    lines: list[str] = []
    for start in range(first, len(table), columns):
        ticks = range(start, min(start + columns, len(table)))
        gaps = [" | " if tick in (separators or ()) else "  " for tick in ticks]
        numbers = [gap + str(tick).ljust(cell_width) for gap, tick in zip(gaps, ticks, strict=True)]
        lines.append(("tick".ljust(label) + "".join(numbers)).rstrip())
        for device in range(len(table[0])):
            for kind in kinds:
                cells = [_cell(table, tick, device, kind, mark) for tick in ticks]
                line = f"device {device} {kind}".ljust(label) + "".join(
                    gap + cell.ljust(cell_width) for gap, cell in zip(gaps, cells, strict=True)
                )
                marked = mark is not None and mark[1:] == (device, kind)
                lines.append(line.rstrip() + ("   <-- here" if marked else ""))
        if mark:
            break
    return lines


def _cell(table, tick: int, device: int, kind: str, mark: Mark | None) -> str:
    text = "+".join(str(a) for a in table[tick][device] if a.kind == kind) or "."
    return f"[{text}]!" if mark == (tick, device, kind) else text


def parse_table(text: str) -> list[list[list[Action]]]:
    """Reads what `render` prints or the like: lines "device D ACTION ...", "." for idle, "+" in a cell.

    A line "tick N ..." gives the tick of the first cell of the lines below it (0 without one); lines of the
    same device add up; all other lines are ignored.
    """
    instance("text", text, str, 'lines "device D ACTION ACTION ..."', who="[schedule]")
    cells: dict[tuple[int, int], list[Action]] = {}
    start = 0
    for line in text.splitlines():
        words = [word for word in line.split("<--")[0].replace("|", " ").split() if word]
        if words[:1] == ["tick"]:
            start = _number(words[1], line) if len(words) > 1 else 0
        if words[:1] == ["device"] and len(words) > 1:
            device = _number(words[1].rstrip(":"), line)
            entries = [word for word in words[2:] if word not in tuple(KINDS)]
            for i, entry in enumerate(entries):
                found = cell_at(device, start + i, entry.strip("[]!"))
                cells.setdefault((start + i, device), []).extend(found)
    if not cells:
        raise Refused(
            '[schedule] the text has no line "device D ACTION ACTION ...", such as "device 0 F0.0 F1.0 . B0.0"'
        )
    ticks, devices = (1 + max(key[i] for key in cells) for i in (0, 1))
    if ticks * devices > len(cells) + _MOST_IDLE:
        raise Refused(
            f"[schedule] the text has ticks up to {ticks - 1} and devices up to {devices - 1}, but only {len(cells)} "
            "cells; count both from 0"
        )
    return [[cells.get((t, d), []) for d in range(devices)] for t in range(ticks)]


def _number(word: str, line: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise Refused(f"[schedule] the text must have a number after tick and device, got {shown(line)}")
    return int(word)
