"""A random generator with the draws that cases are made of. No JAX in here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any


class Dice:
    """Draws that follow from a seed alone, on every machine and under every Python."""

    def __init__(self, *seed: Any):
        self._random = random.Random(" ".join(map(str, seed)))

    def one(self, *choices: Any) -> Any:
        """One of them, all equally likely."""
        return self._random.choice(choices)

    def weighted(self, choices: Mapping[Any, float]) -> Any:
        """One of the keys, as often as its value says."""
        return self._random.choices(list(choices), list(choices.values()))[0]

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self._random.random() < probability

    def some(self, choices: Iterable[Any], probability: float) -> tuple:
        """Each with that probability, in their order."""
        return tuple(choice for choice in choices if self.chance(probability))

    def cuts(self, total: int, parts: int, smallest: int = 1) -> tuple[int, ...]:
        """`total` as a sum of so many ints, none below `smallest`."""
        counts = [smallest] * parts
        for _ in range(total - smallest * parts):
            counts[self._random.randrange(parts)] += 1
        return tuple(counts)
