"""How much work a mixture of experts is, which no program says: that depends on where tokens are sent.

Taken here is that experts are equally popular, as their training aims at: then a device's experts meet as many rows
as its own tokens make choices, whatever room there is for the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxfb.models.grouped_matmul import CPU_TILE, TILE, tile_size
from jaxfb.planner.job import Job
from jaxfb.planner.program import Region, walk
from jaxfb.planner.roofline import RAGGED


@dataclass(frozen=True)
class Routed:
    """rows: that one grouped matmul multiplies. turns: of its loop over tiles, where it is one; half of the last tile
    of each group is empty."""

    rows: float = math.inf
    turns: int = 1


def routed(job: Job, region: Region, platform: str) -> Routed:
    """Returns the routed work of a device in one microbatch.

    region: the step's `sharded_part`, in which a grouped matmul is a ragged product.
    """
    shapes = {op.inputs[0].shape[0]: op for op, _ in walk(region) if op.name in RAGGED}
    if not shapes:
        return Routed()
    room, op = max(shapes.items())
    groups = op.inputs[2].shape[0]
    tokens = job.plan.rows_per_microbatch * job.config.data.sequence_length // job.mesh.shape["context"]
    rows = min(room, tokens * job.sizes.experts_per_token)
    tile = tile_size(room, groups, CPU_TILE if platform == "cpu" else TILE)
    return Routed(rows, round(rows / tile + groups / 2))
