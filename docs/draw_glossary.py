"""Draws the pictures of docs/glossary.md: `python docs/draw_glossary.py [DIRECTORY]` (needs matplotlib)."""

import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxfb import BatchPlan, schedules
from jaxfb.schedules.draw import COLOURS

DIRECTORY = Path(__file__).parent / "glossary"
INK, EDGE = "#20242a", "#8a9099"
REPLICA_COLOURS = ("#3b78c4", "#e08a2e")
WIDTH = 8.4
"""Inches; at 72 points an inch and 9-point text, letters are 12 pixels high on a page 880 pixels wide."""


def main(directory: Path = DIRECTORY) -> None:
    """Writes one SVG for each concept; the same matplotlib writes the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxfb", "font.size": 9}):
        microbatches(directory / "microbatch.svg")
        accumulation(directory / "accumulation.svg")
        one_update(directory / "one_update.svg")
        schedules.timeline_figure(schedules.make("1f1b", 4, 6), directory / "pipeline_tick.svg")


def microbatches(path: Path) -> None:
    """Draws 16 rows, cut into 4 microbatches of 2 rows on each of 2 replicas, as `BatchPlan` cuts them."""
    plan = BatchPlan(rows=16, rows_per_microbatch=2, data_parallel=2)
    figure, axes = canvas(2.6)
    axes.text(0, 4.35, f"global batch: {plan.rows} rows, consumed by one optimizer update", color=INK)
    for index in range(plan.num_microbatches):
        left = index * 4.1
        axes.text(left, 2.35, f"microbatch {index}", color=INK)
        for replica in range(plan.data_parallel):
            for k, row in enumerate(plan.rows_of(index, replica)):
                cell(axes, row, 3.2, REPLICA_COLOURS[replica], f"{row}")
                cell(axes, left + k, 1.2 - 1.15 * replica, REPLICA_COLOURS[replica], f"{row}")
            axes.text(left + 2.1, 1.7 - 1.15 * replica, f"replica {replica}", color=EDGE, va="center")
    save(figure, path)


def accumulation(path: Path) -> None:
    """Draws one device's forward and backward of each of 4 microbatches, and the sum of gradients after each."""
    figure, axes = canvas(1.9)
    bars = schedules.draw.bars(schedules.make("1f1b", 1, 4))
    scale = 16.4 / max(bar.start + bar.length for bar in bars)
    for bar in bars:
        cell(
            axes, scale * bar.start, 2.6, COLOURS[bar.kind], f"{bar.kind}{bar.microbatch}", scale * bar.length
        )
        if bar.kind == "B":
            end, added = (
                scale * (bar.start + bar.length),
                " + ".join(f"g{m}" for m in range(bar.microbatch + 1)),
            )
            axes.text(end - 0.1, 1.6, f"sum = {added}", ha="right", color=INK)
    axes.text(0, 4.0, "one device, one microbatch after the other", color=INK)
    axes.text(0, 0.3, "F forward, B backward, g gradient, each with the microbatch's number", color=EDGE)
    save(figure, path)


def one_update(path: Path) -> None:
    """Draws what one call of a train step does: 4 microbatches, one reduction, one clip, one optimizer update."""
    figure, axes = canvas(2.2)
    bars = schedules.draw.bars(schedules.make("1f1b", 1, 4))
    scale = 10.4 / max(bar.start + bar.length for bar in bars)
    for replica, top in enumerate((2.1, 0.9)):
        axes.text(-0.2, top + 0.45, f"replica {replica}", ha="right", va="center", color=INK)
        for bar in bars:
            cell(
                axes,
                scale * bar.start,
                top,
                COLOURS[bar.kind],
                f"{bar.kind}{bar.microbatch}",
                scale * bar.length,
            )
    for left, width, text in (
        (10.7, 1.8, "reduce\nonce"),
        (12.6, 1.9, "divide,\nclip once"),
        (14.6, 1.9, "update\nonce"),
    ):
        cell(axes, left, 0.9, COLOURS["loss"], text, width, 2.26)
    axes.text(0, 3.55, "gradients of all microbatches are added on each replica", color=INK)
    axes.text(10.6, 3.55, "over the whole global batch", color=INK)
    axes.text(
        0, 0.25, "F forward, B backward, with the microbatch's number; time runs to the right", color=EDGE
    )
    axes.set_xlim(-2, 16.6)
    save(figure, path)


def canvas(height: float) -> tuple[Figure, matplotlib.axes.Axes]:
    """Returns a figure of one plain coordinate system, 16.6 wide."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.1, 16.6), ylim=(0, 4.7))
    axes.axis("off")
    return figure, axes


def cell(
    axes, left: float, bottom: float, colour: str, text: str, width: float = 1, height: float = 1
) -> None:
    """Draws one box with a text in its middle."""
    axes.add_patch(
        Rectangle((left, bottom), width * 0.97, height * 0.95, facecolor=colour, edgecolor="white")
    )
    axes.text(left + width * 0.485, bottom + height * 0.475, text, ha="center", va="center", color="white")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure without its date, so that it changes only with its content."""
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
