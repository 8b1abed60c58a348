"""Implements `jaxfb schedule`: a table, its cost, a picture, a trace."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from jaxfb.refusal import Refused
from jaxfb.schedules.by_name import make
from jaxfb.schedules.compare import comparison, comparison_table
from jaxfb.schedules.draw import chrome_trace, timeline_figure
from jaxfb.schedules.kinds import default_name, kind_of
from jaxfb.schedules.table import Schedule

EXAMPLE = "--pipe 4 --microbatches 8"
LEGEND = """time: of one update; a forward, an input gradient and a weight gradient cost 1 each on a device, or as given
bubble: share of the time in which a device waits
peak activations: how many a device keeps at most, one for each microbatch, chunk and piece
in microbatches: the largest of these peaks, as whole microbatches of a device's layers
Megatron's and published orders run without shared ticks; their devices wait for their neighbours alone"""


def chosen(
    table: str | None,
    kind: str | None,
    pipe: int | None,
    microbatches: int | None,
    chunks: int | None,
    pieces: int | None = None,
) -> Schedule:
    """Returns the schedule that is asked for: a built-in kind by its sizes, or a file with your own table.

    Raises:
      ValueError: sizes are missing or do not fit, or the table is not a schedule; then with its bad cell marked.
    """
    if table is not None:
        if (kind, pipe, microbatches, chunks, pieces) != (None,) * 5:
            raise Refused(
                f"[schedule] --table={table} already defines sizes and kind; "
                "leave out --kind, --pipe, --microbatches, --chunks, --pieces"
            )
        path = Path(table)
        if not path.is_file():
            raise Refused(
                f"[schedule] --table={table} is not a file; write one in the form that {EXAMPLE} prints"
            )
        return Schedule.from_text(path.read_text(), name=path.stem)
    pipe, microbatches = _required(pipe, microbatches)
    pieces = 1 if pieces is None else pieces
    kind = kind or default_name(chunks or 1, pieces)
    return make(kind, pipe, microbatches, kind_of(kind).default_chunks if chunks is None else chunks, pieces)


def check_compared(others: Mapping[str, str | None]) -> None:
    """Refuses flags that a comparison of all kinds, which is a table alone, has no use for."""
    given = [f"--{name} {value}" for name, value in others.items() if value is not None]
    if given:
        them = "it" if len(given) == 1 else "them"
        raise Refused(
            f"[schedule] --compare prints a table of all kinds, without {' and '.join(given)}; leave {them} out"
        )


def compared(
    pipe: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Mapping[str, float],
    pieces: int | None = None,
) -> str:
    """Compares all kinds side by side, and the published orders of Megatron, ZB-V and DualPipeV."""
    pipe, microbatches = _required(pipe, microbatches)
    _check_costs(costs)
    if costs["head"]:
        raise Refused(
            f"[schedule] --compare has no head, which costs every kind the same; leave out --head {costs['head']:g}"
        )
    rest = {name: cost for name, cost in costs.items() if name != "head"}
    sizes = pipe, microbatches, 2 if chunks is None else chunks, 1 if pieces is None else pieces
    return f"{comparison_table(comparison(*sizes, **rest))}\n\n{LEGEND}"


def described(schedule: Schedule, costs: Mapping[str, float]) -> str:
    """Returns the table, and what a step costs."""
    _check_costs(costs)
    result = schedule.simulate(**costs)
    peaks = result.peak_live_activations
    most = max(peaks) / (schedule.num_chunks * schedule.num_pieces)
    chunks = "chunks" if schedule.num_pieces == 1 else "chunks of one piece"
    rows = {
        "time": f"{result.time:g}; {result.ideal_time:g} if no device ever idled",
        "bubble": f"{result.bubble_fraction:.1%} of the time",
        "peak live activations": f"{' '.join(map(str, peaks))} ({chunks}, by device)",
        "memory": f"what {_counted(most)} in the layers of a device, on every device",
    }
    if caches := schedule.slots.most("cache"):
        rows["keys and values"] = (
            f"of {caches} microbatches in a chunk's layers, and their gradients, on every device"
        )
    width = max(map(len, rows))
    return "\n".join([schedule.render(), "", *(f"{name:<{width}}  {text}" for name, text in rows.items())])


def _counted(microbatches: float) -> str:
    return "1 microbatch leaves" if microbatches == 1 else f"{microbatches:g} microbatches leave"


def written(
    schedule: Schedule, costs: Mapping[str, float], out: str | None, picture: str | None, trace: str | None
) -> list[Path]:
    """Writes what is asked for; `out` is a directory for both."""
    if out is not None:
        name = schedule.name.replace(" ", "_").replace(",", "")
        picture, trace = picture or f"{out}/{name}.svg", trace or f"{out}/{name}.json"
    if picture and not find_spec("matplotlib"):
        raise Refused(
            f"[schedule] a picture ({picture}) needs matplotlib, which is not installed; "
            "pip install 'jaxfb[plot]', or ask for --trace alone"
        )
    for path in filter(None, (picture, trace)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return [
        write(schedule, path, costs)
        for write, path in ((timeline_figure, picture), (chrome_trace, trace))
        if path
    ]


def _required(pipe: int | None, microbatches: int | None) -> tuple[int, int]:
    given = {"--pipe": pipe, "--microbatches": microbatches}
    if pipe is None or microbatches is None:
        missing = [name for name, value in given.items() if value is None]
        raise Refused(f"[schedule] {' and '.join(missing)} must be given, such as {EXAMPLE}")
    for name, value in (("--pipe", pipe), ("--microbatches", microbatches)):
        if value < 1:
            raise Refused(f"[schedule] {name} {value} must be at least 1; use {name} 1")
    return pipe, microbatches


def _check_costs(costs: Mapping[str, float]) -> None:
    for name, cost in costs.items():
        if not 0 <= cost < float("inf"):
            raise Refused(
                f"[schedule] --{name.replace('_', '-')} {cost:g} must not be negative or infinite; use 0"
            )
    if costs.get("attention", 0) > 1:
        raise Refused(f"[schedule] --attention {costs['attention']:g} is a share, at most 1; use 1")
    if not any(cost for name, cost in costs.items() if name != "attention"):
        raise Refused("[schedule] every cost is 0, so there is no time to share out; use --forward 1")
