"""ZB-V: no bubble but the wait for the first microbatch, with 1F1B's memory."""

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.steps import Steps
from jaxfb.schedules.builders.v_blocks import Block, v_blocks
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule

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


def zb_v_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Returns each device's actions in the published order of ZB-V (arXiv:2401.10241, section 6) with equal costs.

    It is the order of ScheduleZBVZeroBubble in torch.distributed.pipelining: W follows its B at once but at the end.
    """
    # the order is defined from 2P - 1 microbatches on; without the last of them it stays a possible one
    count = max(num_microbatches, 2 * num_stages - 1)
    orders = [_order(num_stages, count, device) for device in range(num_stages)]
    return [[action for action in order if action.microbatch < num_microbatches] for order in orders]


def _order(num_stages: int, num_microbatches: int, device: int) -> list[Action]:
    steps, below = Steps(), num_stages - 1 - device
    return [
        *steps.each(2 * below + 1, "F0"),
        *steps.each(device, "F1 F0"),
        *steps.each(below + 1, "F1 B1"),
        *steps.each(num_microbatches - 2 * num_stages + 1 + device, "F0 B0 F1 B1"),
        *steps.each(below, "B0 F1 B1"),
        *steps.each(device, "b0 b1"),
        *steps.each(below + 1, "b0 w0"),
        *steps.each(device, "w1"),
        *steps.each(device, "w0"),
    ]
