"""Charges the actions of a schedule: costs by kind of action, by piece, and of the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfb.refusal import number
from jaxfb.schedules.action import Action
from jaxfb.schedules.sizes import WHO, checked_costs


@dataclass(frozen=True)
class Costs:
    """Lists what one microbatch costs on all chunks of a device, in any unit of time.

    Attributes:
      forward: of F.
      backward_input: of B, where W is an action beside it; else B costs both.
      backward_weight: of W.
      head: what head and loss cost each device, in the tick in which the microbatch leaves the last stage.
      attention: the share of the first three, in 0 .. 1, that attention to other tokens has in a whole sequence.

    Raises:
      ValueError: one is negative, infinite or no number, or the share is above 1.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    head: float = 0
    attention: float = 0

    def __post_init__(self):
        costs = dict(vars(self))
        number("attention", costs.pop("attention"), who=WHO, least=0, most=1)
        checked_costs(**costs)

    @property
    def backward(self) -> float:
        """Returns what the whole backward costs."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> float:
        """Returns what forward and backward cost, without the head."""
        return self.forward + self.backward

    def by_kind(self, schedule) -> dict[str, float]:
        """Returns the cost of each kind of action that the schedule has."""
        costs = {"F": self.forward}
        if schedule.splits_backward:
            costs |= {"B": self.backward_input, "W": self.backward_weight}
        elif schedule.has_backward:
            costs["B"] = self.backward
        return costs

    def of_cell(self, schedule, cell: Sequence[Action], kinds: str) -> list[float]:
        """Returns what each of these kinds costs that a device executes, on all its chunks.

        Of sequences in n pieces, piece p has (2 p + 2) / n^2 of attention's share, which is what its blocks of keys
        take, and 1 / n of the rest; in a bubble the first piece is computed.
        """
        costs, n = self.by_kind(schedule), schedule.num_pieces
        if n == 1:
            return [costs[kind] for kind in kinds]
        piece = {action.kind: action.microbatch % n for action in cell}
        return [costs[kind] * self._share(piece.get(kind, 0), n) for kind in kinds]

    def of_head(self, schedule) -> float:
        """Returns what head and loss of an item, a microbatch or a piece of one, cost."""
        return self.head if schedule.num_pieces == 1 else self.head / schedule.num_pieces

    def _share(self, piece: int, num_pieces: int) -> float:
        attention = (2 * piece + 2) / num_pieces**2
        return (1 - self.attention) / num_pieces + self.attention * attention
