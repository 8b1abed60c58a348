"""ZB-V as it was published (forward_backward step), to set its time and memory beside those of `zb_v`."""

from __future__ import annotations

from jaxfb.schedules.action import Action
from jaxfb.schedules.steps import Steps


def zb_v_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Returns each device's actions in the order of ZB-V (arXiv:2401.10241, section 6) with equal costs.

    It is the order of ScheduleZBVZeroBubble in torch.distributed.pipelining: W follows its B at once but at the end.
    """
    # the order is defined from 2P - 1 microbatches on; without the last of them it stays a possible one
    count = max(num_microbatches, 2 * num_stages - 1)
    orders = [_zb_v(num_stages, count, device) for device in range(num_stages)]
    return [[action for action in order if action.microbatch < num_microbatches] for order in orders]


def _zb_v(num_stages: int, num_microbatches: int, device: int) -> list[Action]:
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
