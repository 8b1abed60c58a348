"""Pieces of sequences, microbatches abreast: late pieces share their ticks with late pieces."""

from jaxfb.schedules.builders.lockstep import group_sizes
from jaxfb.schedules.builders.seq1f1b import in_pieces
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule


@schedule_kind("seq_abreast", chunks=lambda asked: (1, asked) if asked > 1 else (1,), pieces=True)
def seq_abreast(num_stages: int, num_microbatches: int, num_chunks: int, num_pieces: int = 1) -> Schedule:
    """Runs the first piece of each microbatch of a group, then the second of each, and backwards in the opposite order.

    A tick takes the time of its longest piece, and attention makes late pieces longer. In `seq1f1b` a late piece of one
    microbatch shares its tick with early ones of the next; here neighbours of a queue are alike, so that of attention
    only P - 1 late pieces a group are waited for. As many ticks as `seq1f1b`. Groups of about P / 2 microbatches, all
    of whose activations and caches are kept.
    """
    size = max(num_stages // 2, -(-num_stages // num_pieces))
    groups, order, first = group_sizes(size, num_microbatches), [], 0
    for group in groups:
        order += [(first + m, piece) for piece in range(num_pieces) for m in range(group)]
        first += group
    return in_pieces("seq_abreast", num_stages, num_chunks, groups, order)
