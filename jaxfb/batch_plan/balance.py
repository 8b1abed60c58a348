"""Equal shares of unequal work: the largest differencing method of Karmarkar and Karp.

Part of the batch-plan step. Every host computes the same shares from the same numbers, so nothing is exchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def cost_of(length: int) -> int:
    """Returns relative time of a sequence: its matrix products and its attention (the formula of ROLL and verl)."""
    return 24576 * length + length * length


def karmarkar_karp(costs: Sequence[int], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Returns indices of `costs` in `parts` groups whose sums differ little (Karmarkar and Karp, 1982).

    equal_counts: every group has len(costs) / parts members, which must divide.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    heap = list(_start(costs, parts, equal_counts))
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, _merge(heapq.heappop(heap), heapq.heappop(heap)))
    return [sorted(members) for _, members in heap[0][2]]


def _start(costs: Sequence[int], parts: int, equal_counts: bool):
    """Returns a state for each item, or one for each `parts` items of similar cost; a state is (-spread, tie,
    groups).
    """
    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    step = parts if equal_counts else 1
    for tie, first in enumerate(range(0, max(len(order), 1), step)):
        items = order[first : first + step]
        groups = [(costs[i], (i,)) for i in items] + [(0, ())] * (parts - len(items))
        yield _state(groups, tie)


def _merge(one: tuple, other: tuple) -> tuple:
    """Joins two states: the heaviest group of one with the lightest of the other, and so on."""
    pairs = zip(one[2], reversed(other[2]), strict=True)
    return _state([(a + b, x + y) for (a, x), (b, y) in pairs], min(one[1], other[1]))


def _state(groups: list, tie: int) -> tuple:
    groups = sorted(groups, key=lambda group: (-group[0], group[1]))
    return groups[-1][0] - groups[0][0], tie, groups
