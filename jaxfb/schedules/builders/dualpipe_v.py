"""DualPipeV: forwards of one chunk alternate with backwards of the other."""

from __future__ import annotations

from collections.abc import Iterator

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.steps import Steps
from jaxfb.schedules.earliest import earliest
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import check_two_chunks, v_placement
from jaxfb.schedules.table import Schedule


@schedule_kind(
    "dualpipe_v",
    chunks=lambda asked: (2,),
    fill=lambda stages: (stages - 1) / 3,
    in_flight=lambda stages, chunks: stages + 1 / 2,
    splits_backward=True,
    by_device=True,
)
def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs one action of two chunks a tick on each device: 6M + P - 1 ticks, for M of at least 2P.

    As short as zb_v, with 2P + 1 half-stages live on every device, one more than zb_v. W follows its B at once but for
    both ends of the schedule, so what B leaves for W is freed earlier. DualPipeV is the half of DeepSeek's DualPipe
    (arXiv:2412.19437, section 3.2.1) that keeps one copy of the parameters. ValueError unless num_chunks is 2.
    """
    check_two_chunks("dualpipe_v", num_chunks, instead="zero_bubble")
    placement = v_placement(num_stages)
    ticks = tuple(earliest(dualpipe_v_orders(num_stages, num_microbatches), placement))
    return Schedule("dualpipe_v", num_stages, num_microbatches, 2, ticks, placement, by_device=True)


def dualpipe_v_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Returns each device's actions in the published order."""
    # it is defined from 2P microbatches on; without the last of them it stays a possible one
    count = max(num_microbatches, 2 * num_stages)
    orders = [_order(num_stages, count, device) for device in range(num_stages)]
    return [[action for action in order if action.microbatch < num_microbatches] for order in orders]


def _order(num_stages: int, num_microbatches: int, device: int) -> list[Action]:
    """Returns a device's actions in eight steps."""
    steps, below = Steps(), num_stages - 1 - device
    return [
        *steps.each(2 * below, "F0"),
        *steps.each(device + 1, "F0 F1"),
        *steps.each(below, "b1 w F1"),
        *steps.each(num_microbatches - 2 * num_stages + device + 1, "F0 B1 F1 B0"),
        *steps.each(below, "B1 F1 B0"),
        *_last_backwards(steps, device),
        *steps.each(below, "w b0"),
        *steps.each(device + 1, "w"),
    ]


def _last_backwards(steps: Steps, device: int) -> Iterator[Action]:
    """Yields B of both chunks in turn; from the middle on their weight gradients are put off."""
    for i in range(2 * (device + 1)):
        yield from steps.each(1, ("B" if i <= device else "b") + str(1 - i % 2))
