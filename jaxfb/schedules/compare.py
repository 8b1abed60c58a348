"""Compares all schedules, and Megatron's: time, bubble and memory."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxfb.refusal import refuse
from jaxfb.schedules.builders.dualpipe_v import dualpipe_v_orders
from jaxfb.schedules.builders.zb_v import zb_v_orders
from jaxfb.schedules.by_name import make
from jaxfb.schedules.costs import Costs
from jaxfb.schedules.earliest import time_of
from jaxfb.schedules.kinds import KINDS
from jaxfb.schedules.megatron import megatron_order, megatron_time, most_in_flight
from jaxfb.schedules.placement import v_placement
from jaxfb.schedules.simulate import simulate
from jaxfb.schedules.sizes import checked_pieces, checked_sizes

PUBLISHED = {"published ZB-V": zb_v_orders, "published DualPipeV": dualpipe_v_orders}


class ComparisonRow(NamedTuple):
    """Holds the numbers of one schedule; times in the unit of the costs.

    peak_live_activations is in chunks (of one piece), by device; peak_microbatches is its largest in whole microbatches
    of a device, which compares across numbers of chunks and pieces.
    """

    name: str
    num_chunks: int
    num_ticks: int | None
    time: float
    bubble_fraction: float
    peak_live_activations: tuple[int, ...]
    peak_microbatches: float


def comparison(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 2,
    num_pieces: int = 1,
    *,
    forward: float = 1,
    backward_input: float = 1,
    backward_weight: float = 1,
    attention: float = 0,
) -> list[ComparisonRow]:
    """Compares every built-in kind, and Megatron's orders where Megatron accepts the sizes.

    Each kind is given the numbers of chunks that suit it: gpipe and 1f1b one, v_shape two, interleaved
    `num_chunks` (at least two), zero_bubble both. With `num_pieces` of at least two, seq1f1b and seq_abreast
    cut sequences into so many and the others leave them whole; with one they are 1f1b and left out. `attention` is
    as in `Schedule.simulate`. Times of what was published (Megatron, ZB-V, DualPipeV) are of independent ranks with
    free transport, ours of lockstep ticks.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(num_stages, num_microbatches, num_chunks)
    costs = Costs(forward, backward_input, backward_weight, attention=attention)
    chunks = max(num_chunks, 2)
    pieces = checked_pieces(num_stages, num_microbatches, chunks, num_pieces)
    kinds = [
        (name, v, pieces if kind.pieces else 1)
        for name, kind in KINDS.items()
        if pieces > 1 or not kind.pieces
        for v in kind.chunks(chunks)
    ]
    rows = [_ours(name, num_stages, num_microbatches, v, n, costs) for name, v, n in kinds]
    rows += [_megatron(num_stages, num_microbatches, 1, costs)]
    if num_stages > 1 and num_microbatches % num_stages == 0:
        rows += [_megatron(num_stages, num_microbatches, chunks, costs)]
    return rows + [_published(name, num_stages, num_microbatches, costs) for name in PUBLISHED]


def comparison_table(rows: Sequence[ComparisonRow]) -> str:
    """Returns the rows as a Markdown table with aligned columns."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, ComparisonRow) for row in rows):
        refuse("rows", rows, "a list of what comparison(...) returns", who="[schedule]")
    head = ("schedule", "chunks", "ticks", "time", "bubble", "peak activations by device", "in microbatches")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    padded = [[text.ljust(w) for text, w in zip(line, widths, strict=True)] for line in cells]
    lines = [f"| {' | '.join(line)} |" for line in padded]
    return "\n".join([lines[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *lines[1:]])


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    return (
        row.name,
        str(row.num_chunks),
        "" if row.num_ticks is None else str(row.num_ticks),
        f"{row.time:g}",
        f"{row.bubble_fraction:.1%}",
        " ".join(map(str, row.peak_live_activations)),
        f"{row.peak_microbatches:g}",
    )


def _ours(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, num_pieces: int, costs: Costs
) -> ComparisonRow:
    schedule = make(name, num_stages, num_microbatches, num_chunks, num_pieces)
    cost = simulate(schedule, costs)
    peaks = cost.peak_live_activations
    label = name if num_pieces == 1 else f"{name}, {num_pieces} pieces"
    numbers = schedule.num_ticks, cost.time, cost.bubble_fraction, peaks
    return ComparisonRow(label, num_chunks, *numbers, max(peaks) / (num_chunks * num_pieces))


def _megatron(num_stages: int, num_microbatches: int, num_chunks: int, costs: Costs) -> ComparisonRow:
    ranks = megatron_order(num_stages, num_microbatches, num_chunks)
    time = megatron_time(ranks, forward=costs.forward, backward=costs.backward)
    ideal = num_microbatches * costs.total
    peaks = tuple(rank.max_in_flight for rank in ranks)
    name = "Megatron 1F1B" if num_chunks == 1 else "Megatron interleaved"
    return ComparisonRow(name, num_chunks, None, time, 1 - ideal / time, peaks, max(peaks) / num_chunks)


def _published(name: str, num_stages: int, num_microbatches: int, costs: Costs) -> ComparisonRow:
    orders = PUBLISHED[name](num_stages, num_microbatches)
    halves = {"F": costs.forward / 2, "B": costs.backward_input / 2, "W": costs.backward_weight / 2}
    time = time_of(orders, v_placement(num_stages), halves)
    peaks = tuple(map(most_in_flight, orders))
    bubble = 1 - num_microbatches * costs.total / time
    return ComparisonRow(name, 2, None, time, bubble, peaks, max(peaks) / 2)
