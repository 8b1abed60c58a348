"""Draws numbers and choices for cases. No JAX in here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any


class Dice:
    """Draws what follows from a seed alone, on every machine and under every Python."""

    def __init__(self, *seed: Any):
        self._random = random.Random(" ".join(map(str, seed)))

    def one(self, *choices: Any) -> Any:
        """Returns one of them, all equally likely."""
        return self._random.choice(choices)

    def weighted(self, choices: Mapping[Any, float]) -> Any:
        """Returns one of the keys, with probabilities in proportion to the values."""
        return self._random.choices(list(choices), list(choices.values()))[0]

    def chance(self, probability: float) -> bool:
        """Returns True with that probability."""
        return self._random.random() < probability

    def some(self, choices: Iterable[Any], probability: float) -> tuple:
        """Returns some of them in their order, each with that probability."""
        return tuple(choice for choice in choices if self.chance(probability))

    def cuts(self, total: int, parts: int, smallest: int = 1) -> tuple[int, ...]:
        """Returns `total` as a sum of so many integers, none below `smallest`."""
        counts = [smallest] * parts
        for _ in range(total - smallest * parts):
            counts[self._random.randrange(parts)] += 1
        return tuple(counts)
