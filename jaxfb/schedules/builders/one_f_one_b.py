"""1F1B: a tick of the steady phase is one forward and one backward a device."""

from jaxfb.schedules.builders.lockstep import Timed, backward_start, backwards, forwards, tabulate
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.table import Schedule


@schedule_kind("1f1b")
def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int, name: str = "1f1b") -> Schedule:
    """Starts the backward in the tick in which the first microbatch leaves the last chunk.

    Three static phases, for M a multiple of P: F (P*V - 1 ticks), F+B (M*V - P*V + P), B (P*V - 1).
    Time (M*V + P - 1) * (f + b) / V. Live chunk activations P*V + P - 1 - 2d on device d, whatever M is.
    """
    timed = paired_ticks(num_stages, num_microbatches, num_chunks)
    return tabulate(name, timed, loop_placement(num_stages, num_chunks), num_microbatches)


def paired_ticks(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Timed]:
    """Returns F and B of 1F1B, each in its tick."""
    start = backward_start(num_stages, num_microbatches, num_chunks)
    forward = forwards(num_stages, num_microbatches, num_chunks)
    return forward + backwards(num_stages, num_microbatches, num_chunks, start)
