"""V-shape: two chunks a device, down the devices and up again; even memory."""

from jaxfb.schedules.action import Action
from jaxfb.schedules.builders.lockstep import tabulate
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.placement import check_two_chunks, homes_of, v_placement
from jaxfb.schedules.table import Schedule


@schedule_kind(
    "v_shape",
    chunks=lambda asked: (2,),
    fill=lambda stages: 2 * stages - 1,
    in_flight=lambda stages, chunks: stages,
)
def v_shape(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs F of microbatch m, stage x at tick 2m + x, and B at tick 2m + 4P - 2 - x.

    1F1B's time (M + P - 1) * (f + b) with 2P half-stages live on every device. Embedding and loss are both on
    device 0, so tied weights are used on one device only. ValueError unless num_chunks is 2.
    """
    check_two_chunks("v_shape", num_chunks, instead="interleaved")
    placement = v_placement(num_stages)
    timed = []
    for stage, (device, chunk) in enumerate(homes_of(placement)):
        for m in range(num_microbatches):
            timed.append((2 * m + stage, device, Action("F", m, chunk)))
            timed.append((2 * m + 4 * num_stages - 2 - stage, device, Action("B", m, chunk)))
    return tabulate("v_shape", timed, placement, num_microbatches)
