"""1F1B of pieces of sequences (forward_backward step): forwards in the order of the tokens, backwards against it."""

from jaxfb.schedules.action import Action
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.lockstep import Timed, group_sizes, queue_of, tabulate
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.table import Schedule


@schedule_kind("seq1f1b", chunks=lambda asked: (1, asked) if asked > 1 else (1,), pieces=True)
def seq1f1b(num_stages: int, num_microbatches: int, num_chunks: int, num_pieces: int = 1) -> Schedule:
    """Starts the backward in the tick in which the last piece of the first microbatch leaves the last chunk.

    Seq1F1B (arXiv:2406.03488) with F and B in one tick. For n pieces and one chunk, three static phases: F (n + P - 2
    ticks), F+B (M*n - n + 1), B (n + P - 2). Time (M*n*V + P - 1) * (f + b) / (n*V) where pieces cost the same. With
    one chunk device d keeps n + 2 * (P - 1 - d) pieces at the most, whatever M is. With one piece it is 1F1B, or
    interleaved.
    """
    groups = [num_pieces * size for size in group_sizes(-(-num_stages // num_pieces), num_microbatches)]
    positions = queue_of(groups, num_stages, num_chunks)
    start = positions[num_pieces - 1, num_chunks - 1] + num_stages - 1
    timed: list[Timed] = []
    for (item, visit), k in positions.items():
        backward = Action("B", item + num_pieces - 1 - 2 * (item % num_pieces), num_chunks - 1 - visit)
        for d in range(num_stages):
            timed.append((k + d, d, Action("F", item, visit)))
            timed.append((start + k + num_stages - 1 - d, d, backward))
    placement = loop_placement(num_stages, num_chunks)
    return tabulate("seq1f1b", timed, placement, num_microbatches, num_pieces=num_pieces)
