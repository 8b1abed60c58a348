"""Megatron-LM's own per-rank orders, to set its bubble and memory beside ours.

Its ranks run independently, each executing its list of F and B as soon as the inputs are there; ours share
ticks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfb.refusal import Refused, boolean, integer, refuse
from jaxfb.schedules.action import Action
from jaxfb.schedules.earliest import time_of
from jaxfb.schedules.placement import loop_placement
from jaxfb.schedules.sizes import WHO, checked_costs, checked_sizes


@dataclass(frozen=True)
class MegatronRank:
    """Lists the actions that one rank executes, in order.

    Attributes:
      num_warmup: forwards before the first pair of F and B.
      order: its actions; B is input and weight gradient in one. Stage of chunk c is c * num_stages + rank.
    """

    rank: int
    num_warmup: int
    order: tuple[Action, ...]

    @property
    def max_in_flight(self) -> int:
        """Returns the most chunk activations that wait for their backward at one time."""
        return most_in_flight(self.order)


def megatron_order(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    interleaved: bool | None = None,
    forward_only: bool = False,
) -> tuple[MegatronRank, ...]:
    """Returns the execution orders of Megatron-LM's schedules, rank by rank.

    Args:
      group_size: microbatches that visit a chunk before the next chunk's turn
        (`microbatch_group_size_per_vp_stage`); num_stages if not given. Used by the interleaved schedule
        only.
      interleaved: None picks as Megatron does, by num_chunks > 1.
      forward_only: all forwards, no backward.
    Raises:
      ValueError: what Megatron refuses: a group smaller than num_stages or larger than M, or a last group
        that is shorter than num_stages.
    """
    num_stages, num_microbatches, num_chunks = checked_sizes(num_stages, num_microbatches, num_chunks)
    group_size = None if group_size is None else integer("group_size", group_size, who=WHO)
    interleaved = num_chunks > 1 if interleaved is None else boolean("interleaved", interleaved, who=WHO)
    boolean("forward_only", forward_only, who=WHO)
    group = group_size or num_stages
    if interleaved:
        _check_groups(num_stages, num_microbatches, group)
    elif num_chunks > 1:
        raise Refused(
            f"chunks need the interleaved schedule; got num_chunks={num_chunks} with interleaved=False; "
            f"use num_chunks=1",
            [{"num_chunks": 1}, {"interleaved": None}],
        )
    forward = schedule_table(num_microbatches, num_chunks, group)
    backward = [(m, num_chunks - 1 - c) for m, c in forward]
    ranks = []
    for rank in range(num_stages):
        warmup = num_stages - rank - 1
        if interleaved:
            warmup = 2 * warmup + (num_chunks - 1) * group
        warmup = len(forward) if forward_only else min(warmup, len(forward))
        order = _order(forward, () if forward_only else backward, warmup)
        ranks.append(MegatronRank(rank, warmup, order))
    return tuple(ranks)


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """Returns (microbatch, chunk) of each forward slot: groups of microbatches, within a group chunk after chunk."""
    return [
        (m, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for m in range(start, min(start + group_size, num_microbatches))
    ]


def _check_groups(num_stages: int, num_microbatches: int, group: int) -> None:
    if not num_stages <= group <= num_microbatches:
        least = {"num_microbatches": -(-max(num_microbatches, 1) // num_stages) * num_stages}
        raise Refused(
            f"Megatron needs num_stages <= group_size <= num_microbatches; got num_stages={num_stages}, "
            f"group_size={group}, num_microbatches={num_microbatches}; "
            f"use group_size={num_stages} and at least {num_stages} microbatches",
            [{"group_size": num_stages} | least],
        )
    rest = num_microbatches % group
    if 0 < rest < num_stages:
        raise Refused(
            f"Megatron needs a last group of at least num_stages={num_stages} microbatches; got {rest} "
            f"(num_microbatches={num_microbatches}, group_size={group}); "
            f"use {num_microbatches - rest} or {num_microbatches - rest + num_stages} microbatches",
            [{"num_microbatches": num_microbatches - rest + more} for more in (0, num_stages)],
        )


def _order(forward: Sequence, backward: Sequence, warmup: int) -> tuple[Action, ...]:
    order = [Action("F", *item) for item in forward[:warmup]]
    done = iter(backward)
    for item in forward[warmup:]:
        order += [Action("F", *item), Action("B", *next(done))]
    return (*order, *(Action("B", *item) for item in done))


def most_in_flight(order: Sequence[Action]) -> int:
    """Returns the most forwards at one time whose last reader, W or else B, has not run."""
    last = "W" if any(action.kind == "W" for action in order) else "B"
    live = most = 0
    for action in order:
        live += (action.kind == "F") - (action.kind == last)
        most = max(most, live)
    return most


def megatron_time(ranks: Sequence[MegatronRank], *, forward: float, backward: float) -> float:
    """Returns the time of one step if transport costs nothing; costs are of one microbatch on all chunks of a rank."""
    if (
        not isinstance(ranks, list | tuple)
        or not all(isinstance(rank, MegatronRank) for rank in ranks)
        or not ranks
    ):
        refuse("ranks", ranks, "a list of what megatron_order(...) returns", who=WHO)
    checked_costs(forward=forward, backward=backward)
    num_chunks = 1 + max(action.chunk for action in ranks[0].order)
    costs = {"F": forward / num_chunks, "B": backward / num_chunks}
    return time_of([rank.order for rank in ranks], loop_placement(len(ranks), num_chunks), costs)
