"""Ramp-up: how many rows an update has, as a function of the rows consumed so far.

Part of the batch-plan step, used by `RunPlan`. Both of Megatron-LM's forms are read: the step schedule
("0:768 250B:1536") and the older start, increment, samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxfb.batch_plan.refusal import PlanError, nearest, offer, positive_int

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_WHO = "ramp-up"


@dataclass(frozen=True)
class RampUp:
    """Rows of an update by steps: `steps[i] = (consumed rows from which it holds, rows of an update)`.

    The first step starts at 0; steps are sorted here. Rows may also shrink. Each distinct row count is one
    compilation of the train step: `row_counts` lists them.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        steps = tuple(sorted(_step(pair) for pair in self.steps))
        starts = [start for start, _ in steps]
        if not steps or starts[0] != 0:
            got = f"starts at {starts[0]}" if steps else "is empty"
            raise PlanError(f"[{_WHO}] the first step must start at 0 consumed rows, this one {got}")
        if len(set(starts)) < len(starts):
            raise PlanError(f"[{_WHO}] two steps start at the same number of consumed rows: {starts}")
        object.__setattr__(self, "steps", steps)

    @classmethod
    def parse(cls, text: str, sequence_length: int | None = None) -> RampUp:
        """Reads "0:768 250B:1536" (suffixes K, M, B, T are powers of 1000).

        Thresholds are rows, or tokens where `sequence_length` is given (tokens // sequence_length rows).
        """
        per_row = 1 if sequence_length is None else positive_int(_WHO, "sequence_length", sequence_length)
        pairs = [_parse_pair(pair, text) for pair in text.split()]
        return cls(tuple((start // per_row, rows) for start, rows in pairs))

    @classmethod
    def linear(cls, start: int, increment: int, samples: int, rows: int) -> RampUp:
        """From `start` rows by equal steps of `increment` to `rows`, reached at `samples` consumed rows."""
        values = {"start": start, "increment": increment, "samples": samples, "rows": rows}
        start, increment, samples, rows = (positive_int(_WHO, name, value) for name, value in values.items())
        growth = rows - start
        if growth <= 0:
            raise PlanError(
                f"[{_WHO}] start {start} must be below the {rows} rows it grows to, or leave ramp-up out"
            )
        if growth % increment:
            legal = nearest(increment, growth, lambda value: growth % value == 0)
            choices = [{"increment": value} for value in legal]
            raise PlanError(
                f"[{_WHO}] growth from {start} to {rows} rows = {growth} is not a multiple of "
                f"increment {increment}{offer(choices, 'increment')}",
                choices,
            )
        count = growth // increment
        if samples < count:
            raise PlanError(
                f"[{_WHO}] {count} increments need samples of at least {count}, got {samples}",
                [{"samples": count}],
            )
        return cls(tuple((-(-i * samples // count), start + i * increment) for i in range(count + 1)))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The distinct row counts, in the order in which they first hold."""
        return tuple(dict.fromkeys(rows for _, rows in self.steps))

    def rows_at(self, consumed_rows: int) -> int:
        """Rows of the update that starts when `consumed_rows` have been consumed."""
        return self.steps[self._step_at(consumed_rows)][1]

    def next_change(self, consumed_rows: int) -> int | None:
        """The next threshold above `consumed_rows`; None after the last."""
        following = self._step_at(consumed_rows) + 1
        return self.steps[following][0] if following < len(self.steps) else None

    def _step_at(self, consumed_rows: int) -> int:
        return bisect_right(self.steps, consumed_rows, key=lambda step: step[0]) - 1


def _step(pair: Sequence[int]) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise PlanError(f"[{_WHO}] a step is (consumed rows, rows of an update), got {pair!r}")
    start, rows = pair
    is_zero = start == 0 and not isinstance(start, bool)
    return 0 if is_zero else positive_int(_WHO, "a step's start", start), positive_int(_WHO, "rows", rows)


def _parse_pair(pair: str, text: str) -> tuple[int, int]:
    start, colon, rows = pair.partition(":")
    try:
        if not colon:
            raise ValueError(pair)
        return _parse_count(start), _parse_count(rows)
    except (ValueError, KeyError):
        raise PlanError(
            f'[{_WHO}] cannot read "{pair}" in "{text}"; write pairs such as "0:768 250B:1536"'
        ) from None


def _parse_count(text: str) -> int:
    """ "250B" or "1.5M" as an int."""
    scale = _SUFFIXES.get(text[-1:].upper(), 1)
    value = Fraction(text[:-1] if scale > 1 else text) * scale
    if value.denominator != 1 or value < 0:
        raise ValueError(text)
    return int(value)


def as_ramp_up(value: RampUp | str | Sequence | None) -> RampUp | None:
    """A RampUp from what a config holds: itself, None, a string of steps in rows, or a list of pairs."""
    if value is None or isinstance(value, RampUp):
        return value
    return RampUp.parse(value) if isinstance(value, str) else RampUp(value)
