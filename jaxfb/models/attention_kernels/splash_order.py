"""The order in which the backward of splash attention visits pairs of blocks, of queries and of keys, as tables.

All queries of a block of keys are visited in turn, and only blocks of which something is seen: no step is empty. What
is seen of a pair follows from how far its queries are behind its keys in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

FAR = 2**15
"""A distance of queries from keys, in blocks, at which all is seen where there is no window."""
NOTHING = -1
"""The distance of a pair of which nothing is seen."""


class Visits(NamedTuple):
    """Pairs of blocks in the order of their visits.

    keys, queries: i32[N], numbers of blocks; each block of keys is visited.
    distance: i32[N], how many blocks the queries are behind the keys in the sequence; NOTHING where nothing is seen.
    """

    keys: Any
    queries: Any
    distance: Any


def visits(distances: np.ndarray, block: int, window: int | None = None) -> Visits:
    """Returns the visits of the pairs of which something is seen.

    Args:
      distances: i32[blocks of queries, blocks of keys], how many blocks the queries are behind the keys.
      block: tokens of a block.
      window: tokens that a query sees, itself included.
    """
    seen = (distances >= 0) & (True if window is None else distances < seen_blocks(block, window))
    visited = seen.copy()
    visited[0] |= ~seen.any(0)  # whose gradients are zeros, which have to be written
    keys, queries = np.nonzero(visited.T)
    distance = np.where(seen, distances, NOTHING)[queries, keys]
    return Visits(*(x.astype(np.int32) for x in (keys, queries, distance)))


def visits_of_devices(distances: np.ndarray, block: int, window: int | None = None) -> Visits:
    """Returns those of each device, [C, N], of distances i32[C, blocks of queries, blocks of keys]."""
    found = [visits(of_one, block, window) for of_one in distances]
    most = max(len(one.keys) for one in found)
    return Visits(*map(np.stack, zip(*(_lengthened(one, most) for one in found), strict=True)))


def in_order(queries: int, keys: int, before: int = 0) -> np.ndarray:
    """Returns the distances of blocks of queries from blocks of keys of which `before` come before the queries."""
    return np.arange(queries)[:, None] + before - np.arange(keys)


def unmasked(queries: int, keys: int) -> np.ndarray:
    """Returns the distances of queries that see all keys."""
    return np.full((queries, keys), FAR)


def seen_blocks(block: int, window: int) -> int:
    """Returns how many blocks of keys a block of queries sees in a window."""
    return (window + block - 2) // block + 1


def _lengthened(one: Visits, length: int) -> Sequence[np.ndarray]:
    """Visits the last pair again until there are so many, and computes nothing then."""
    more = length - len(one.keys)
    ends = one.keys[-1], one.queries[-1], NOTHING
    return [np.concatenate([x, np.full(more, end, x.dtype)]) for x, end in zip(one, ends, strict=True)]
