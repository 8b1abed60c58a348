"""1F1B (forward_backward step): a tick of the steady phase is one forward and one backward a device."""

from jaxfb.schedules.lockstep import Timed, backward_start, backwards, forwards


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Timed]:
    """Backward starts in the tick in which the first microbatch leaves the last chunk.

    Three static phases, for M a multiple of P: F (P*V - 1 ticks), F+B (M*V - P*V + P), B (P*V - 1).
    Time (M*V + P - 1) * (f + b) / V. Live chunk activations P*V + P - 1 - 2d on device d, whatever M is.
    """
    start = backward_start(num_stages, num_microbatches, num_chunks)
    return forwards(num_stages, num_microbatches, num_chunks) + backwards(
        num_stages, num_microbatches, num_chunks, start
    )
