"""V-Min: a third of 1F1B's activation memory, in about 1F1B's time."""

from jaxfb.schedules.builders.v_blocks import Block, v_blocks
from jaxfb.schedules.kinds import schedule_kind
from jaxfb.schedules.table import Schedule

BLOCKS = (
    Block((1, 1, 1, 1), (3, 3, 3)),
    Block((1, 1, 1, 1), (3, 1, 3)),
    Block((1, 1, 1, 1), (1, 1, 1)),
    Block((1, 1, 1, 1), (3, 5, 3)),
)


@schedule_kind(
    "v_min",
    chunks=lambda asked: (2,),
    fill=lambda stages: (4 * stages - 5) / 3 if stages > 1 else 0.0,
    in_flight=lambda stages, chunks: most_live(stages) / 2,
    splits_backward=True,
    by_device=True,
)
def v_min(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Runs one action of two chunks a tick on each device: about 6M + 4P - 5 ticks, for M of at least P.

    At most 2 floor((P + 1) / 3) + 2 half-stages are live on every device (arXiv:2405.15362, V-Min). ValueError unless
    num_chunks is 2.
    """
    most = most_live(num_stages)
    return v_blocks("v_min", num_stages, num_microbatches, num_chunks, BLOCKS, most)


def most_live(num_stages: int) -> int:
    """Returns how many half-stages' activations a device keeps at most."""
    return 2 * ((num_stages + 1) // 3) + 2
