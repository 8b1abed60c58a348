"""GPipe: all forwards, then all backwards. The baseline: memory grows with M."""

from jaxfb.schedules.builders.lockstep import backwards, forwards, tabulate
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.table import Schedule


@schedule_kind("gpipe", baseline=True)
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs every F, then every B in the same order. Time (M*V + P - 1) * (f + b) / V; all M*V activations are live.

    The loss is still taken when a microbatch leaves the last stage, so its gradient waits there for the first
    B.
    """
    forward = forwards(num_stages, num_microbatches, num_chunks)
    start = 1 + max(tick for tick, _, _ in forward)
    timed = forward + backwards(num_stages, num_microbatches, num_chunks, start)
    return tabulate("gpipe", timed, loop_placement(num_stages, num_chunks), num_microbatches)
