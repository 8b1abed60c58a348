"""V-Half: half of 1F1B's activation memory, in less time than 1F1B."""

from jaxfb.schedules.builders.v_blocks import Block, v_blocks
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule

BLOCKS = (
    Block((1, 2, 1, 2), (4, 2, 4)),
    Block((1, 2, 1, 2), (1, 1, 2)),
    Block((1, 2, 2, 1), (4, 1, 4)),
    Block((1, 2, 2, 1), (4, 3, 4)),
    Block((1, 2, 1, 2), (4, 4, 2)),
)


@schedule_kind(
    "v_half",
    chunks=lambda asked: (2,),
    fill=lambda stages: max(stages - 5 / 3, (stages - 1) / 3),
    in_flight=lambda stages, chunks: stages / 2 + 1,
    splits_backward=True,
    by_device=True,
)
def v_half(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs one action of two chunks a tick on each device: about 6M + 3P - 5 ticks, for M of at least P.

    At most P + 2 half-stages are live on every device (arXiv:2405.15362, V-Half). ValueError unless num_chunks is 2.
    """
    return v_blocks("v_half", num_stages, num_microbatches, num_chunks, BLOCKS, most=num_stages + 2)
