"""Writes out a device's order of actions from repeated steps, as papers describe schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxfb.schedules.action import Action


@dataclass
class Steps:
    """Counts the microbatches of each kind and chunk, and keeps the weight gradients that are put off.

    A step is F, B (with its W behind it), or b (a B whose W is put off), with a chunk; w is the oldest W that was put
    off, w0 or w1 the oldest of that chunk.
    """

    begun: Counter = field(default_factory=Counter)
    put_off: list[Action] = field(default_factory=list)

    def each(self, times: int, steps: str) -> Iterator[Action]:
        """Yields the actions of some steps, such as "F0 B1", so many times over."""
        for _ in range(times):
            for step in steps.split():
                yield from self._step(step)

    def _step(self, step: str) -> Iterator[Action]:
        if step[0] == "w":
            yield self.put_off.pop(self._oldest(step[1:]))
            return
        kind, chunk = step[0].upper(), int(step[1])
        action = Action(kind, self.begun[step.upper()], chunk)
        self.begun[step.upper()] += 1
        yield action
        if kind == "B":
            weights = action._replace(kind="W")
            if step[0] == "b":
                self.put_off.append(weights)
            else:
                yield weights

    def _oldest(self, chunk: str) -> int:
        return next(i for i, action in enumerate(self.put_off) if chunk in ("", str(action.chunk)))
