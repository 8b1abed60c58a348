"""ZB-V (forward_backward step): no bubble but the wait for the first microbatch, with 1F1B's memory."""

from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule
from jaxfb.schedules.v_blocks import Block, v_blocks

BLOCKS = (Block((4, 2, 4, 2), (4, 1, 2)),)


@schedule_kind(
    "zb_v",
    chunks=lambda asked: (2,),
    fill=lambda stages: (stages - 1) / 3,
    in_flight=lambda stages, chunks: stages,
    splits_backward=True,
    by_device=True,
)
def zb_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs one action of two chunks a tick on each device: 6M + P - 1 ticks, for M of at least P.

    No schedule of two chunks with f = b_input = b_weight is shorter: the last device has 6M actions and gets its first
    input after P - 1 half-stages. At most 2P half-stages are live on every device, as many as Megatron's 1F1B has.
    The zero-bubble paper's ZB-V (arXiv:2401.10241, section 6). ValueError unless num_chunks is 2.
    """
    return v_blocks("zb_v", num_stages, num_microbatches, num_chunks, BLOCKS, most=2 * num_stages)
