"""Ramp-up: how many rows an update has, as a function of the rows consumed so far.

Part of the batch-plan step, used by `RunPlan`. Both of Megatron-LM's forms are read: the step schedule
("0:768 250B:1536") and the older start, increment, samples.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from jaxfb.batch_plan.refusal import MOST_ROWS, PlanError, nearest, not_negative, offer, positive_int
from jaxfb.refusal import shown

_MOST_STEPS = 10_000
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)([KMBT]?)", re.IGNORECASE)
_WHO = "ramp-up"
_PAIRS = 'pairs such as "0:768 250B:1536"'


@dataclass(frozen=True)
class RampUp:
    """Sets the rows of an update by steps: `steps[i] = (consumed rows from which it holds, rows of an update)`.

    The first step starts at 0; steps are sorted here. Rows may also shrink. Each distinct row count is one
    compilation of the train step: `row_counts` lists them.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.steps, list | tuple):
            raise PlanError(
                f"[{_WHO}] steps must be a list of (consumed rows, rows of an update), got {shown(self.steps)}"
            )
        steps = tuple(sorted(_step(pair) for pair in self.steps))
        starts = [start for start, _ in steps]
        if not steps or starts[0] != 0:
            got = f"starts at {starts[0]}" if steps else "is missing"
            raise PlanError(f"[{_WHO}] the first of the steps must start at 0 consumed rows, but it {got}")
        if len(set(starts)) < len(starts):
            raise PlanError(f"[{_WHO}] two steps start at the same number of consumed rows: {starts}")
        object.__setattr__(self, "steps", steps)

    @classmethod
    def parse(cls, text: str, sequence_length: int | None = None) -> RampUp:
        """Reads "0:768 250B:1536" (suffixes K, M, B, T are powers of 1000).

        Thresholds are rows, or tokens where `sequence_length` is given (tokens // sequence_length rows).
        """
        per_row = 1 if sequence_length is None else positive_int(_WHO, "sequence_length", sequence_length)
        pairs = [_parse_pair(pair, text) for pair in text.split()] if isinstance(text, str) else []
        if not pairs:
            raise PlanError(f"[{_WHO}] text must be {_PAIRS}, got {shown(text)}")
        steps = tuple((start // per_row, rows) for start, rows in pairs)
        if len(dict(steps)) < len(dict(pairs)):
            raise PlanError(
                f"[{_WHO}] with sequence_length={per_row} tokens a row, two steps of {shown(text)} start at the same "
                "row; move them apart, or leave sequence_length out where they count rows"
            )
        return cls(steps)

    @classmethod
    def linear(cls, start: int, increment: int, samples: int, rows: int) -> RampUp:
        """Makes a ramp-up from `start` to `rows` in equal steps, the last after `samples` consumed rows."""
        values = {"start": start, "increment": increment, "rows": rows}
        start, increment, rows = (positive_int(_WHO, name, value) for name, value in values.items())
        samples = positive_int(_WHO, "samples", samples, MOST_ROWS)
        _check_growth(start, increment, rows)
        steps = (rows - start) // increment
        _check_steps(steps, start, increment, samples, rows)
        return cls(tuple((-(-i * samples // steps), start + i * increment) for i in range(steps + 1)))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Returns the distinct row counts, in the order in which they first hold."""
        return tuple(dict.fromkeys(rows for _, rows in self.steps))

    def rows_at(self, consumed_rows: int) -> int:
        """Returns the rows of the update that starts when `consumed_rows` have been consumed."""
        consumed_rows = not_negative(_WHO, "consumed_rows", consumed_rows)
        return self.steps[self._step_at(consumed_rows)][1]

    def next_change(self, consumed_rows: int) -> int | None:
        """Returns the next threshold above `consumed_rows`; None after the last."""
        consumed_rows = not_negative(_WHO, "consumed_rows", consumed_rows)
        following = self._step_at(consumed_rows) + 1
        return self.steps[following][0] if following < len(self.steps) else None

    def _step_at(self, consumed_rows: int) -> int:
        return bisect_right(self.steps, consumed_rows, key=lambda step: step[0]) - 1


def _check_growth(start: int, increment: int, rows: int) -> None:
    """Refuses a linear ramp-up that does not grow, or not by whole increments."""
    growth = rows - start
    if growth <= 0:
        raise PlanError(
            f"[{_WHO}] start {start} must be below the {rows} rows it grows to, or leave ramp-up out"
        )
    if growth % increment:
        legal = nearest(increment, growth, lambda value: growth % value == 0)
        choices = [{"increment": value} for value in legal]
        raise PlanError(
            f"[{_WHO}] with start={start}, growth from {start} to {rows} rows = {growth} is not a multiple of "
            f"increment {increment}{offer(choices, 'increment')}",
            choices,
        )


def _check_steps(steps: int, start: int, increment: int, samples: int, rows: int) -> None:
    """Refuses more steps than there are samples, or than can be compiled."""
    if samples < steps:
        raise PlanError(
            f"[{_WHO}] {steps} increments from start={start} to rows={rows} need samples of at least {steps}, "
            f"got {samples}",
            [{"samples": steps}],
        )
    if steps > _MOST_STEPS:
        growth = rows - start
        least = -(-growth // _MOST_STEPS)
        legal = next(value for value in range(least, growth + 1) if growth % value == 0)
        raise PlanError(
            f"[{_WHO}] increment {increment} makes {steps} steps from start={start} to rows={rows}, each compiled "
            f"anew; use increment={legal}",
            [{"increment": legal}],
        )


def _step(pair: Sequence[int]) -> tuple[int, int]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise PlanError(
            f"[{_WHO}] each of the steps is (consumed rows, rows of an update), got {shown(pair)}"
        )
    start, rows = pair
    return not_negative(_WHO, "the start of one of the steps", start), positive_int(
        _WHO, "rows of the steps", rows
    )


def _parse_pair(pair: str, text: str) -> tuple[int, int]:
    start, colon, rows = pair.partition(":")
    try:
        if not colon:
            raise ValueError(pair)
        return _parse_count(start), _parse_count(rows)
    except ValueError:
        raise PlanError(
            f"[{_WHO}] cannot read {shown(pair, 30)} in the text {shown(text, 50)}; write {_PAIRS}"
        ) from None


def _parse_count(text: str) -> int:
    """Returns "250B" or "1.5M" as an integer."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(text)
    value = Fraction(match[1]) * _SUFFIXES.get(match[2].upper(), 1)
    if value.denominator != 1:
        raise ValueError(text)
    return int(value)


def as_ramp_up(value: RampUp | str | Sequence | None) -> RampUp | None:
    """Returns a RampUp from what a config holds: itself, None, a string of steps in rows, or a list of pairs."""
    if value is None or isinstance(value, RampUp):
        return value
    if not isinstance(value, str | list | tuple):
        raise PlanError(
            f"[run] ramp_up must be a RampUp, a string of {_PAIRS}, or a list of steps, got {shown(value)}"
        )
    try:
        return RampUp.parse(value) if isinstance(value, str) else RampUp(cast(Any, value))
    except PlanError as error:
        raise PlanError(f"[run] ramp_up: {error}") from None
