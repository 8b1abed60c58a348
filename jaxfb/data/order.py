"""The order of rows: a permutation for each epoch, a pure function of the seed and the position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def row_order(num_rows: int, seed: int | None) -> Callable[[int], int]:
    """Returns position in the endless stream -> row; each epoch is another permutation of all rows."""
    if seed is None:
        return lambda position: position % num_rows
    import grain

    # Mixed first: grain adds the epoch to the seed, so neighbouring seeds would repeat each other's epochs.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    shuffled: Any = grain.MapDataset.range(num_rows).shuffle(seed=mixed).repeat()
    return shuffled.__getitem__
