"""1F1B of pieces of sequences: forwards in the order of the tokens, backwards against it."""

from collections.abc import Sequence

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.lockstep import Timed, group_sizes, queue_of, tabulate
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.table import Schedule

Order = Sequence[tuple[int, int]]
"""(microbatch, piece) of each forward in the queue; the backward at the same place is of the mirrored piece."""


@schedule_kind("seq1f1b", chunks=lambda asked: (1, asked) if asked > 1 else (1,), pieces=True)
def seq1f1b(num_stages: int, num_microbatches: int, num_chunks: int, num_pieces: int = 1) -> Schedule:
    """Starts the backward in the tick in which the last piece of the first microbatch leaves the last chunk.

    Seq1F1B (arXiv:2406.03488) with F and B in one tick. For n pieces and one chunk, three static phases: F (n + P - 2
    ticks), F+B (M*n - n + 1), B (n + P - 2). Time (M*n*V + P - 1) * (f + b) / (n*V) where pieces cost the same. With
    one chunk device d keeps n + 2 * (P - 1 - d) pieces at the most, whatever M is. With one piece it is 1F1B, or
    interleaved.
    """
    groups = group_sizes(-(-num_stages // num_pieces), num_microbatches)
    order = [(m, piece) for m in range(num_microbatches) for piece in range(num_pieces)]
    return in_pieces("seq1f1b", num_stages, num_chunks, groups, order)


def in_pieces(name: str, num_stages: int, num_chunks: int, groups: Sequence[int], order: Order) -> Schedule:
    """Returns the schedule of a queue of pieces.

    groups: numbers of microbatches all of whose pieces visit a chunk before the next chunk's turn.
    """
    num_microbatches, num_pieces = sum(groups), 1 + max(piece for _, piece in order)
    positions = queue_of([num_pieces * size for size in groups], num_stages, num_chunks)
    mirrored = [(microbatch, num_pieces - 1 - piece) for microbatch, piece in order]
    place = {item: index for index, item in enumerate(mirrored)}
    waits = (positions[index, num_chunks - 1] - positions[place[item], 0] for index, item in enumerate(order))
    start, last = num_stages - 1 + max(waits), num_stages - 1
    timed: list[Timed] = []
    for (index, visit), k in positions.items():
        forward, backward = (m * num_pieces + piece for m, piece in (order[index], mirrored[index]))
        for d in range(num_stages):
            timed.append((k + d, d, Action("F", forward, visit)))
            timed.append((start + k + last - d, d, Action("B", backward, num_chunks - 1 - visit)))
    placement = loop_placement(num_stages, num_chunks)
    return tabulate(name, timed, placement, num_microbatches, num_pieces=num_pieces)
