"""Pictures of a schedule: a timeline as SVG or PNG, and a trace for Perfetto.

Both show lockstep time: a tick takes as long as the device that has most to do in it, and the others stand
idle. Costs are keyword arguments of `Schedule.simulate`, one microbatch on all chunks of a device.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfb.refusal import Refused
from jaxfb.schedules.action import KINDS, Action
from jaxfb.schedules.costs import Costs
from jaxfb.schedules.render import headline
from jaxfb.schedules.simulate import executed_kinds, simulate

COLOURS = {"F": "#3b78c4", "B": "#e08a2e", "W": "#7a5ba8", "loss": "#3f9c6d"}
IDLE = "#eceef1"
_MEMORY = 1.1
"""Inches of the lines that show how much is kept."""
LABELS = {"F": "forward", "B": "backward", "W": "weight gradient", "loss": "head and loss"}


class Bar(NamedTuple):
    """A stretch of a device's time; `microbatch`, of sequences in pieces the piece, is None in a bubble."""

    device: int
    kind: str
    start: float
    length: float
    tick: int
    microbatch: int | None
    chunk: int | None


def bars(schedule, costs: Costs | None = None) -> list[Bar]:
    """Returns everything that every device executes, in order of time; adds up to `simulate(...).time` on each
    device.
    """
    costs = costs or Costs()
    head = costs.of_head(schedule)
    last = schedule.num_stages * schedule.num_chunks - 1
    losses = {schedule.ticks["F", m, last]: m for m in range(schedule.num_items)} if head else {}
    found, now = [], 0.0
    for tick, executed in enumerate(executed_kinds(schedule)):
        cells = zip(schedule.table[tick], executed, strict=True)
        lengths = [
            [cost / schedule.num_chunks for cost in costs.of_cell(schedule, cell, kinds)]
            for cell, kinds in cells
        ]
        work = max(map(sum, lengths))
        for device, kinds in enumerate(executed):
            steps = _steps(schedule.table[tick][device], kinds, lengths[device], work)
            if tick in losses:
                after_f = len(steps) if schedule.by_device else kinds.find("F") + 1
                steps.insert(after_f, ("loss", head, losses[tick], None))
            found += _in_sequence(device, tick, now, steps)
        now += work + (head if tick in losses else 0)
    return sorted(found, key=lambda bar: (bar.tick, bar.device, bar.start))


def _steps(cell: Sequence[Action], kinds: str, lengths: Sequence[float], work: float) -> list[tuple]:
    """Returns (kind, length, microbatch, chunk) of what a device executes in a tick, and of its wait until `work`."""
    done = {action.kind: (action.microbatch, action.chunk) for action in cell}
    steps: list[tuple] = [
        (kind, length, *done.get(kind, (None, None))) for kind, length in zip(kinds, lengths, strict=True)
    ]
    idle = work - sum(length for _, length, _, _ in steps)
    return [*steps, ("idle", idle, None, None)] if idle > 0 else steps


def _in_sequence(device: int, tick: int, start: float, steps: Sequence[tuple]) -> Iterator[Bar]:
    """Yields the bars of (kind, length, microbatch, chunk), one after another."""
    for kind, length, microbatch, chunk in steps:
        yield Bar(device, kind, start, length, tick, microbatch, chunk)
        start += length


def timeline_figure(schedule, path: str | Path, costs: Mapping[str, float] | None = None) -> Path:
    """Draws the schedule to a .svg, .png or .pdf file and returns its path.

    One lane a device, time to the right. Colour is the kind, its shade the chunk, the number in it the
    microbatch, light grey the bubble; dashed lines separate the static phases. Below, the microbatches whose
    activations a device keeps for the backward, a line a device.
    """
    path = Path(path)
    _check_suffix(path)
    cost = Costs(**(costs or {}))
    found, result = bars(schedule, cost), simulate(schedule, cost)
    figure, axes, below = _panels(schedule, len(found) / schedule.num_stages)
    _draw_bars(axes, found, schedule, result.time, figure.get_size_inches()[0])
    if not schedule.by_device:
        _draw_phases(axes, schedule, result.tick_times)
    _label(axes, schedule, result, {bar.kind for bar in found}, below)
    if below is not None:
        _draw_memory(below, schedule, found, result.time)
    metadata = {"Date": None} if path.suffix == ".svg" else None  # the same schedule gives the same file
    figure.savefig(path, bbox_inches="tight", dpi=150, metadata=metadata)
    return path


def _check_suffix(path: Path) -> None:
    if path.suffix not in (".svg", ".png", ".pdf"):
        use = str(path.with_suffix(".svg"))
        raise Refused(
            f"a timeline is written as .svg, .png or .pdf; got path={str(path)!r}; use path={use!r}",
            [{"path": use}],
        )


def _panels(schedule, bars_of_a_device: float) -> tuple[Any, Any, Any]:
    """Returns a figure, its axes of the lanes, and those of the memory below; None without a backward."""
    try:
        from matplotlib.figure import Figure  # heavy, and only needed here
    except ImportError:
        raise Refused("a timeline picture needs matplotlib; pip install 'jaxfb[plot]'") from None

    width, lanes = min(max(8.0, 0.27 * bars_of_a_device), 48.0), 0.5 * schedule.num_stages
    figure = Figure(figsize=(width, 1.5 + lanes + _MEMORY * schedule.has_backward))
    if not schedule.has_backward:
        return figure, figure.add_subplot(), None
    heights = {"height_ratios": (lanes, _MEMORY), "gridspec_kw": {"hspace": 0.15}}
    return figure, *figure.subplots(2, sharex=True, **heights)


def chrome_trace(schedule, path: str | Path, costs: Mapping[str, float] | None = None) -> Path:
    """Writes a trace for Perfetto or chrome://tracing, with a track for each device and costs as milliseconds.

    Each device also has a counter of its live chunk activations.
    """
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": schedule.name}}]
    for device in range(schedule.num_stages):
        name = {"name": f"device {device}"}
        events.append({"ph": "M", "pid": 0, "tid": device, "name": "thread_name", "args": name})
    found = bars(schedule, Costs(**(costs or {})))
    events += [_work_event(bar) for bar in found if bar.microbatch is not None]
    for device in range(schedule.num_stages):
        events += [_memory_event(device, *change) for change in live_activations(schedule, found, device)]
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


def _work_event(bar: Bar) -> dict:
    name = f"{bar.kind}{bar.microbatch}" + ("" if bar.chunk is None else f".{bar.chunk}")
    return {
        "ph": "X",
        "name": name,
        "cat": LABELS[bar.kind],
        "pid": 0,
        "tid": bar.device,
        "ts": bar.start * 1000,
        "dur": bar.length * 1000,
        "args": {"microbatch": bar.microbatch, "chunk": bar.chunk, "tick": bar.tick},
    }


def _memory_event(device: int, time: float, live: int) -> dict:
    name = f"live activations, device {device}"
    return {"ph": "C", "name": name, "pid": 0, "ts": time * 1000, "args": {"chunks": live}}


def live_activations(schedule, found: Sequence[Bar], device: int) -> list[tuple[float, int]]:
    """Returns (time, chunks whose activations the device keeps from then on), in order of time.

    A forward's activations live from its start to the end of their last reader.
    """
    last_reader = "W" if schedule.splits_backward else "B"
    mine = [bar for bar in found if bar.device == device and bar.microbatch is not None]
    changes = [(bar.start, 1) for bar in mine if bar.kind == "F"]
    changes += [(bar.start + bar.length, -1) for bar in mine if bar.kind == last_reader]
    live, counted = 0, []
    for time, change in sorted(changes):
        live += change
        counted.append((time, live))
    return counted


def _draw_memory(axes, schedule, found: Sequence[Bar], time: float) -> None:
    from matplotlib.ticker import MaxNLocator

    parts = schedule.num_chunks * schedule.num_pieces
    for device in range(schedule.num_stages):
        changes = [(0.0, 0), *live_activations(schedule, found, device), (time, 0)]
        times, live = zip(*changes, strict=True)
        shade = str(0.7 * device / max(schedule.num_stages - 1, 1))  # from black, device 0, to grey
        axes.step(times, [chunks / parts for chunks in live], where="post", color=shade)
    axes.set(ylim=(0, None))
    axes.set_ylabel("microbatches kept\n(black: device 0)", fontsize=8.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes, found: list[Bar], schedule, time: float, inches: float) -> None:
    for bar in found:
        shade = (
            None if bar.microbatch is None else _shade(COLOURS[bar.kind], bar.chunk or 0, schedule.num_chunks)
        )
        axes.broken_barh(
            [(bar.start, bar.length)],
            (bar.device - 0.44, 0.88),
            facecolor=shade or IDLE,
            edgecolor="white",
            linewidth=0.8,
        )
        if shade and bar.microbatch is not None and inches * bar.length / time > 0.14:
            dark = sum(shade) < 1.9
            axes.text(
                bar.start + bar.length / 2, bar.device, _number(bar.microbatch, schedule.num_pieces),
                ha="center", va="center", fontsize=9, color="white" if dark else "#20242a",
            )  # fmt: skip


def _number(item: int, num_pieces: int) -> str:
    """Returns the microbatch of an item; of pieces with theirs, such as 3.0 for the first."""
    return str(item) if num_pieces == 1 else f"{item // num_pieces}.{item % num_pieces}"


def _shade(colour: str, chunk: int, num_chunks: int) -> tuple[float, ...]:
    """Lightens later chunks: from the full colour to 60 % white."""
    white = 0.6 * chunk / max(num_chunks - 1, 1)
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(c + (1 - c) * white for c in (red, green, blue))


def _draw_phases(axes, schedule, tick_times: tuple[float, ...]) -> None:
    for phase in schedule.phases:
        start, stop = sum(tick_times[: phase.start]), sum(tick_times[: phase.stop])
        if phase.start:
            axes.axvline(start, color="#8a9099", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(
            (start + stop) / 2,
            -0.62,
            "+".join(phase.kinds),
            ha="center",
            va="bottom",
            fontsize=9,
            color="#6b7280",
        )


def _label(axes, schedule, result, kinds: set[str], below) -> None:
    from matplotlib.patches import Patch

    devices = range(schedule.num_stages)
    peaks = " ".join(map(str, result.peak_live_activations))
    axes.set_title(
        f"{headline(schedule)}\n"
        f"time {result.time:g}, bubble {result.bubble_fraction:.1%}, peak live activations {peaks}",
        loc="left", fontsize=10, pad=16,
    )  # fmt: skip
    axes.set(xlim=(0, result.time), ylim=(schedule.num_stages - 0.45, -0.55))
    axes.set_yticks(devices, [f"device {d}" for d in devices])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = [kind for kind in (*KINDS, "loss") if kind in kinds]
    labels = LABELS | ({"B": "input gradient"} if schedule.splits_backward else {})
    patches = [Patch(color=COLOURS[k], label=labels[k]) for k in shown] + [Patch(color=IDLE, label="idle")]
    lowest = axes if below is None else below
    lowest.set_xlabel("time", loc="left")
    lowest.legend(
        handles=patches, ncols=len(patches), loc="upper right", bbox_to_anchor=(1, 0), borderaxespad=2.4,
        frameon=False, fontsize=9,
    )  # fmt: skip
