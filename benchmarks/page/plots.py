"""The page's pictures: lines or bars as SVG. A picture is drawn anew only if what it shows has changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

INK, GRID = "#333333", "#e6e6e6"
COLOURS = {
    "1f1b": "#2e6f95",
    "interleaved": "#3a9d6b",
    "zero_bubble": "#e0a030",
    "v_shape": "#8c6bb1",
    "zb_v": "#b5497e",
    "v_half": "#5f9ea0",
    "v_min": "#7f6a3f",
    "gpipe": "#8a8a8a",
    "ring": "#2e6f95",
    "all_gather": "#e0a030",
    "all_to_all": "#8c6bb1",
    "none": "#8a8a8a",
    "selective": "#2e6f95",
    "full": "#3a9d6b",
}
OTHERS = ("#d1495b", "#1b1b1b", "#9ec1e6", "#b07a4b")
"""Of what is not ours, dashed, in order of appearance."""


@dataclass(frozen=True)
class Panel:
    """lines: label -> (x, y) points in order. bars: label -> length, drawn sideways. rule: where equal is."""

    title: str
    x: str
    y: str = ""
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    log_y: bool = False
    rule: float | None = None


@dataclass(frozen=True)
class Picture:
    """name: of its file. says: what one sees, for those who do not."""

    name: str
    says: str
    panels: tuple[Panel, ...]

    def digest(self) -> str:
        """Of what is drawn and of how: equal digests, equal pictures."""
        return hashlib.sha256((repr(self) + Path(__file__).read_text()).encode()).hexdigest()[:16]

    def is_current(self, path: Path) -> bool:
        return path.exists() and self.digest() in path.read_text()

    def draw(self, path: Path) -> None:
        """Writes the SVG. The same matplotlib gives the same bytes, and another one does not touch what is current.

        Raises:
          ValueError: matplotlib is missing.
        """
        if self.is_current(path):
            return
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError:
            raise ValueError("[bench] a picture needs matplotlib; pip install 'jaxfb[plot]'") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none", "font.size": 9}):
            columns = min(2, len(self.panels))
            lines = -(-len(self.panels) // columns)
            height = max(2.9, *(0.9 + 0.19 * len(panel.bars) for panel in self.panels))
            size = (1.2 + 4.0 * columns, lines * height)
            figure = Figure(figsize=size, layout="constrained", facecolor="white")
            grid = figure.subplots(lines, columns, squeeze=False, sharey=any(p.bars for p in self.panels))
            for axes, panel in zip(grid.flat, self.panels, strict=False):
                _draw(axes, panel)
            _legend(figure)
            figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": self.digest()})


def _draw(axes, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

    if panel.rule is not None:
        (axes.axvline if panel.bars else axes.axhline)(panel.rule, color=INK, linewidth=0.8, linestyle=":")
    if panel.bars:
        axes.barh(list(panel.bars), list(panel.bars.values()), color=COLOURS["1f1b"], height=0.6)
        axes.set_ylim(len(panel.bars) - 0.5, -0.5)
    others = iter(OTHERS)
    for label, points in panel.lines.items():
        style = {"color": COLOURS[label]} if label in COLOURS else {"color": next(others), "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), label=label, marker="o", markersize=3.5, linewidth=1.6, **style)
    if panel.lines:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(
            FixedLocator(sorted({x for line in panel.lines.values() for x, _ in line}))
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.rule is None and not panel.bars:
        axes.set_ylim(0, None)
    axes.set_title(panel.title, fontsize=9, color=INK)
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if panel.bars else "y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(figure) -> None:
    """One for all panels, beside them."""
    found = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside right center", frameon=False, labelcolor=INK)
