"""Interleaved 1F1B: V chunks a device divide the bubble by V."""

from jaxfb.schedules.builders.one_f_one_b import one_f_one_b
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule


@schedule_kind("interleaved", chunks=lambda asked: (max(asked, 2),))
def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs 1F1B's rule with several chunks, hence 1F1B's function: the queue does the interleaving.

    Bubble (P - 1) / V microbatches. M need not be a multiple of P; see `lockstep.group_sizes`.
    """
    return one_f_one_b(num_stages, num_microbatches, num_chunks, "interleaved")
