"""The memory of every candidate as a bar against the line of what a chip has (`jaxfb plan --search`)."""

from __future__ import annotations

from pathlib import Path

from jaxfb.planner.compiled import Compiled, TooLarge
from jaxfb.planner.verdict import Verdict

PARTS = ("parameters", "optimizer", "batch", "gradients", "activations", "working")
COLOURS = ("#3b6ea8", "#7aa6d6", "#c9c9c9", "#e0a030", "#c8553d", "#8c6bb1")


def memory_bars(rows: list[tuple[str, Verdict]], path: Path, most: int = 24) -> None:
    """Writes a picture; bars are the formula's parts, a black mark is the compiler's total.

    rows: (label, verdict), best first.
    """
    from matplotlib.figure import Figure

    rows = rows[:most]
    figure = Figure(figsize=(11, 2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, verdict) in enumerate(rows):
        left = 0.0
        for part, colour in zip(PARTS, COLOURS, strict=True):
            size = getattr(verdict.estimate, part) / 1e9
            axes.barh(place, size, left=left, color=colour, label=part if place == 0 else None)
            left += size
        if verdict.compiled is not None:
            name = "compiler's total" if place == 0 else None
            axes.plot(
                [verdict.needed / 1e9] * 2, [place - 0.4, place + 0.4], color="black", lw=2.5, label=name
            )
        axes.text(max(left, verdict.needed / 1e9), place, _beside(verdict), va="center", fontsize=8)
    limit = (rows[0][1].available or 0) / 1e9
    axes.axvline(limit, color="#b00020", ls="--", label=f"HBM a program may use: {limit:.1f} GB")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.35 * max([limit, *(max(v.needed, v.estimate.total) / 1e9 for _, v in rows)]))
    axes.set_xlabel("GB a device")
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    axes.set_title(
        f"{rows[0][1].topology.text}: memory of each layout, those that fit first, the compiled before the estimated"
    )
    figure.savefig(path, dpi=140)


def _beside(verdict: Verdict) -> str:
    if isinstance(verdict.compiled, TooLarge):
        return " the compiler refused"
    by = "compiled" if isinstance(verdict.compiled, Compiled) else "estimated"
    return f" {verdict.step_seconds:.2f} s, MFU {verdict.mfu:.0%}, {by}"
