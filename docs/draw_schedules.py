"""Draws the pictures of docs/schedules.md: `python docs/draw_schedules.py [DIRECTORY]` (needs matplotlib)."""

import sys
from pathlib import Path

import matplotlib

from jaxfb import schedules

DIRECTORY = Path(__file__).parent / "schedules"
STAGES, MICROBATCHES, PIECES = 4, 4, 2


def main(directory: Path = DIRECTORY) -> None:
    """Writes one SVG for each kind, of two pieces or else two chunks where it takes several; the same matplotlib, the
    same bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxfb", "font.size": 9}):
        for name in schedules.NAMES:  # the built-in ones
            kind = schedules.KINDS[name]
            sizes = (min(kind.chunks(2)), PIECES) if kind.pieces else (max(kind.chunks(2)), 1)
            schedule = schedules.make(name, STAGES, MICROBATCHES, *sizes)
            schedules.timeline_figure(schedule, directory / f"{name}.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
