"""Estimates the work that no program contains: of experts, since it depends on where tokens are sent, and of attention
to earlier pieces of a sequence, since it depends on the piece.

Taken here is that experts are equally popular, as their training aims at: then a device's experts meet as many rows
as its own tokens make choices, whatever space there is for the worst case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfb.mesh import GPU_PLATFORMS
from jaxfb.models.grouped_matmul import TILE, TILE_OF_GPUS, tile_size
from jaxfb.models.moe import how_dispatched
from jaxfb.models.piece_attention import block_of_keys
from jaxfb.parallel.expert import Space, spaces
from jaxfb.planner.job import Job
from jaxfb.planner.program_cost.piece_turns import mean_turns

_RAGGED = ("ragged_dot", "ragged_dot_general")


@dataclass(frozen=True)
class Routed:
    """share: of the rows that a grouped matmul has space for, those that it multiplies. turns: of its loop over tiles,
    where it is one; half of the last tile of each group is empty; or of the loop over earlier pieces. Both are means of
    several spaces; of_space: (rows of a space, its share, its turns) of each.
    """

    share: float = 1.0
    turns: float = 1
    of_space: Sequence[tuple[int, float, float]] = ()

    def of(self, rows: Collection[int]) -> tuple[float, float]:
        """Returns (share, turns) of the largest of the spaces that is among such numbers of rows; the means of none."""
        found = [(space, share, turns) for space, share, turns in self.of_space if space in rows]
        return max(found)[1:] if found else (self.share, self.turns)


def routed(job: Job, jaxpr: Any) -> Routed:
    """Returns the work of a device's experts in one product; or the turns over earlier pieces of a sequence. Which of
    the two a program has: pieces are refused with experts.

    jaxpr: of the traced step, in which a grouped matmul is a ragged product.
    """
    if job.schedule is not None and job.schedule.num_pieces > 1:
        return Routed(turns=mean_turns(job.schedule) * _turns_of_piece(job, jaxpr))
    found = [
        [var.aval.shape for var in eqn.invars] for eqn, _ in equations(jaxpr) if eqn.primitive.name in _RAGGED
    ]
    if not found:
        return Routed()
    allotted = _spaces(job)
    share = sum(one.even for one in allotted) / sum(one.rows for one in allotted)
    used = {one.rows: one.even / one.rows for one in allotted}
    devices: Any = job.mesh.devices
    most = TILE_OF_GPUS if devices.flat[0].platform in ("gpu", *GPU_PLATFORMS) else TILE
    turns = [
        (space, used.get(space, share) * space / tile_size(space, groups, most) + groups / 2)
        for (space, *_), _, (groups, *_), *_ in found
    ]
    of_space = [(space, used.get(space, share), number) for space, number in sorted(set(turns))]
    return Routed(share, sum(number for _, number in turns) / len(turns), of_space)


def _turns_of_piece(job: Job, jaxpr: Any) -> int:
    """Returns turns for one earlier piece: a kernel's call, or blocks of its keys."""
    if any(eqn.primitive.name == "pallas_call" for eqn, _ in equations(jaxpr)):
        return 1
    tokens = job.config.data.sequence_length // job.config.parallel.pieces
    return tokens // block_of_keys(tokens)


def _spaces(job: Job) -> list[Space]:
    """Returns the space of a microbatch that is exchanged at once, and of each turn where it is exchanged in turns."""
    sizes, mesh = job.sizes, job.mesh.shape
    replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    tokens = (
        job.plan.rows_per_global_microbatch // replicas * job.config.data.sequence_length // mesh["context"]
    )
    how = how_dispatched(sizes, tokens)
    ways = [how] if len(how["shares"]) == 1 else [{**how, "shares": (1,)}, how]
    given = tokens, sizes.experts_per_token, sizes.num_experts, mesh["expert"]
    return [space for way in ways for space in spaces(*given, **way)]


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields (equation, how often it runs) of a jaxpr and of the programs of its calls, loops and branches.

    A kernel is one equation; of `by_platform`, the branch of any platform.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn, times
        if eqn.primitive.name != "pallas_call":
            for inner in _inner(eqn):
                yield from equations(
                    inner, times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
                )


def _inner(eqn: Any) -> list[Any]:
    branches = eqn.params.get("branches", ())
    if eqn.params.get("branches_platforms"):
        branches = branches[-1:]
    others = (value for name, value in eqn.params.items() if name != "branches")
    return [one for one in (*others, *branches) if hasattr(getattr(one, "jaxpr", one), "eqns")]
