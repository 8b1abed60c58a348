"""The length of a run: how many updates, which rows each consumes, and where epochs end.

Part of the batch-plan step. Everything follows from row counts alone, so it is the same on any number of
processes, replicas and microbatches.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple, cast

from jaxfb.batch_plan.fit import divide
from jaxfb.batch_plan.plan import REMAINDERS, BatchPlan, Remainder, plans_by_purpose
from jaxfb.batch_plan.ramp_up import RampUp, as_ramp_up
from jaxfb.batch_plan.refusal import (
    MOST_ROWS,
    PlanError,
    around,
    not_negative,
    offer,
    one_of,
    positive_int,
)
from jaxfb.refusal import INT32, only_legal, shown

_LENGTHS = ("updates", "samples", "tokens", "epochs")
_ENDLESS = MOST_ROWS
_MOST = {
    "updates": INT32,
    "samples": MOST_ROWS,
    "tokens": MOST_ROWS,
    "dataset_rows": MOST_ROWS,
    "sequence_length": INT32,
}
_MOST_EPOCHS = 100_000


class Window(NamedTuple):
    """Locates the rows of one update: `rows` real rows of the stream from row `start` on, cut by `plan`."""

    update: int
    epoch: int
    start: int
    rows: int
    plan: BatchPlan

    @property
    def end(self) -> int:
        """Returns the row of the stream behind its last: how many rows are consumed after its update."""
        return self.start + self.rows


class _Stretch(NamedTuple):
    """`count` equal windows in a row, the first of them update number `update`."""

    update: int
    start: int
    rows: int
    count: int
    plan: BatchPlan


@dataclass(frozen=True)
class RunPlan:
    """Holds the plans of a run by purpose, and its length in exactly one of updates, samples, tokens or epochs.

    `total_updates` is derived once, here. A window of rows never crosses the end of an epoch (where
    `dataset_rows` is given) or of the run; the window that is cut short there is padded with rows of weight
    0, dropped, or refused. Positions count the rows of the stream passed so far, dropped ones included.

    Args:
      plans: {purpose: BatchPlan} with at least "train", or the train plan alone.
      updates, samples, tokens, epochs: the length; samples are rows, epochs may be a fraction.
      dataset_rows: rows of one epoch; required for epochs, without it the stream never ends.
      sequence_length: tokens of one row; required for tokens.
      ramp_up: rows of an update by consumed rows; must end at the train plan's rows. Also a string or pairs.
      remainder: "pad", "drop" or "error": what becomes of a short last window.

    Raises:
      PlanError: a ValueError, before anything is compiled; also when a ramp-up size makes no legal plan.
    """

    plans: Mapping[str, BatchPlan] | BatchPlan = field(hash=False)
    _: KW_ONLY
    updates: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: int | float | None = None
    dataset_rows: int | None = None
    sequence_length: int | None = None
    ramp_up: RampUp | str | Sequence | None = None
    remainder: Remainder = "pad"

    def __post_init__(self) -> None:
        plans = {"train": self.plans} if isinstance(self.plans, BatchPlan) else self.plans
        object.__setattr__(self, "plans", plans_by_purpose("run", plans))
        object.__setattr__(self, "ramp_up", as_ramp_up(self.ramp_up))
        one_of("run", "remainder", self.remainder, REMAINDERS)
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, positive_int("run", name, value, most))
        _check_length(self)
        _check_ramp_up(self)
        _check_number_of_epochs(self)
        _check_drop(self)
        _check_some_updates(self)

    @property
    def by_purpose(self) -> Mapping[str, BatchPlan]:
        """Returns the plans by their purposes, also where the train plan was given alone."""
        return cast(Mapping[str, BatchPlan], self.plans)  # since __post_init__

    @property
    def _ramp(self) -> RampUp | None:
        return cast(RampUp | None, self.ramp_up)  # since __post_init__

    @property
    def train(self) -> BatchPlan:
        """Returns the plan of a full update, after any ramp-up."""
        return self.by_purpose["train"]

    @cached_property
    def total_updates(self) -> int:
        """Returns the number of updates of the whole run."""
        return sum(stretch.count for stretch in self._stretches)

    @property
    def pads(self) -> bool:
        """Returns whether some update has fewer rows than its plan, so that rows of zeros fill it up."""
        return any(stretch.rows < stretch.plan.real_rows for stretch in self._stretches)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Returns the distinct numbers of rows of updates, in order; the train step is compiled once for each."""
        return tuple(dict.fromkeys(stretch.plan.rows for stretch in self._stretches))

    def rows_at(self, consumed_rows: int) -> int:
        """Returns the planned rows of the update that starts at this position."""
        consumed_rows = not_negative("run", "consumed_rows", consumed_rows)
        return self._ramp.rows_at(consumed_rows) if self._ramp else self.train.rows

    def plan_at(self, consumed_rows: int) -> BatchPlan:
        """Returns the train plan of the update that starts at this position."""
        return self._plan_of[self.rows_at(consumed_rows)]

    def window(self, update: int) -> Window:
        """Returns update number `update`, from 0: its plan, its real rows and where they start."""
        update = not_negative("run", "update", update)
        if not 0 <= update < self.total_updates:
            raise PlanError(f"[run] no update {update}: there are {self.total_updates}, counted from 0")
        stretch = self._stretches[bisect_right(self._stretches, update, key=lambda s: s.update) - 1]
        start = stretch.start + (update - stretch.update) * stretch.rows
        return Window(update, start // (self.dataset_rows or _ENDLESS), start, stretch.rows, stretch.plan)

    def windows(self, first: int = 0) -> Iterator[Window]:
        """Yields every update in order, from update number `first` on (where a resumed run continues)."""
        return map(self.window, range(self._first(first), self.total_updates))

    def table(self) -> list[tuple[str, Any]]:
        """Returns (name, value) of what decides the length and what follows from it, in reading order."""
        given = (*_LENGTHS, "dataset_rows", "sequence_length")
        rows = [(name, value) for name in given if (value := getattr(self, name)) is not None]
        last = self.window(self.total_updates - 1)
        total_rows = sum(stretch.rows * stretch.count for stretch in self._stretches)
        rows += [("updates", self.total_updates)] if self.updates is None else []
        rows += [
            ("rows in all", total_rows),
            ("rows of an update", ", then ".join(map(str, self.row_counts))),
        ]
        rows += [("rows of the last update", last.rows)] if last.rows != last.plan.real_rows else []
        return [*rows, ("remainder", self.remainder)]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for saving with a run."""
        names = (*_LENGTHS, "dataset_rows", "sequence_length", "remainder")
        return {
            **{name: getattr(self, name) for name in names},
            "ramp_up": [list(step) for step in self._ramp.steps] if self._ramp else None,
            "plans": {purpose: plan.to_dict() for purpose, plan in self.by_purpose.items()},
        }

    def _first(self, first: int) -> int:
        if not_negative("run", "first", first) <= self.total_updates:
            return first
        raise PlanError(
            f"[run] first={first} is after the last of {self.total_updates} updates, counted from 0"
        )

    @cached_property
    def _plan_of(self) -> dict[int, BatchPlan]:
        counts = self._ramp.row_counts if self._ramp else (self.train.rows,)
        return {rows: self.train.replace(rows=rows) for rows in counts}

    @cached_property
    def _stretches(self) -> tuple[_Stretch, ...]:
        return tuple(_cut(self, _row_limit(self), self.updates or _ENDLESS))


def horizon_warning(lr_horizon: int, total_updates: int, final_lr: float = 0.0) -> str | None:
    """Returns a warning if a learning-rate schedule and a run differ in length; None if they agree."""
    beyond = total_updates - lr_horizon
    if beyond > 0:
        outcome = f"lr is {final_lr:g} for the last {beyond}"
    else:
        outcome = f"the run stops {-beyond} updates before the end of the schedule"
    ends = f"schedule ends at {lr_horizon}, run makes {total_updates} updates"
    return f"{ends}: {outcome}; set the horizon to {total_updates}" if beyond else None


def _cut(run: RunPlan, row_limit: int, update_limit: int) -> Iterator[_Stretch]:
    """Cuts the stream into stretches of equal windows: at ends of epochs, at ramp-up steps and at the end."""
    update = position = 0
    while position < row_limit and update < update_limit:
        plan = run.plan_at(position)
        change = (run._ramp and run._ramp.next_change(position)) or _ENDLESS
        end = min(row_limit, _end_of_epoch(run, position, plan.real_rows))
        fit = (end - position) // plan.real_rows
        count = min(fit, divide(change - position, plan.real_rows, "pad"), update_limit - update)
        rows = plan.real_rows
        if fit == 0:
            rows, count = end - position, _count_short(run, end, end - position, plan, update)
        if count:
            yield _Stretch(update, position, rows, count, plan)
        update += count
        position += rows * max(count, 1)


def _end_of_epoch(run: RunPlan, position: int, rows: int) -> int:
    """Returns the end of the epoch at this position; of the stream, where windows of so many rows never cross one."""
    size = run.dataset_rows or _ENDLESS
    if size % rows == 0 and position % size % rows == 0:
        return _ENDLESS
    return (position // size + 1) * size


def _count_short(run: RunPlan, end: int, left: int, plan: BatchPlan, update: int) -> int:
    """Returns 1 if a short window becomes an update, 0 if it is dropped."""
    if run.remainder != "error":
        return int(run.remainder == "pad")
    whole_epochs = run.dataset_rows and end % run.dataset_rows == 0
    length = next(f"{name}={getattr(run, name)}" for name in _LENGTHS if getattr(run, name))
    what = f"dataset_rows={run.dataset_rows}" if whole_epochs else length
    largest = max(each.real_rows for each in run._plan_of.values())
    may_drop = update and largest <= (run.dataset_rows or _ENDLESS)
    legal = ("pad", "drop") if may_drop else ("pad",)
    raise PlanError(
        f"[run] {what} does not divide into updates of {plan.real_rows} rows ({left} left over); use remainder="
        + " or ".join(f'"{policy}"' for policy in legal),
        [{"remainder": policy} for policy in legal],
    )


def _row_limit(run: RunPlan) -> int:
    """Returns the rows after which the run ends, where its length is not given in updates."""
    if run.tokens and run.sequence_length:
        return _rows_of_tokens(run, run.tokens, run.sequence_length)
    if run.epochs:
        return math.ceil(Fraction(str(run.epochs)) * (run.dataset_rows or 0))
    return run.samples or _ENDLESS


def _rows_of_tokens(run: RunPlan, tokens: int, sequence_length: int) -> int:
    rows = divide(tokens, sequence_length, run.remainder)
    if rows:
        return rows
    unit = sequence_length * run.train.real_rows  # whole updates, so that no other remainder is left
    near = [{"tokens": choice} for choice in around(tokens, unit)]
    choices = only_legal([*near, {"remainder": "pad"}], lambda choice: dataclasses.replace(run, **choice))
    raise PlanError(
        f"[run] {tokens} tokens are not whole rows of sequence_length {sequence_length}"
        f"{offer(choices, 'tokens')}",
        choices,
    )


def _check_length(run: RunPlan) -> None:
    """Checks that exactly one length is given, with what it needs."""
    lengths = {name: getattr(run, name) for name in _LENGTHS if getattr(run, name) is not None}
    if len(lengths) != 1:
        got = " and ".join(f"{name}={shown(value)}" for name, value in lengths.items()) or "none"
        choices = [{other: None for other in lengths if other != name} for name in lengths]
        raise PlanError(
            f"[run] give exactly one of updates, samples, tokens or epochs, got {got}",
            only_legal(choices, lambda choice: dataclasses.replace(run, **choice)) if lengths else (),
        )
    if run.epochs is not None:
        _check_epochs(run.epochs)
    for length, needed in (("epochs", "dataset_rows"), ("tokens", "sequence_length")):
        if length in lengths and getattr(run, needed) is None:
            raise PlanError(f"[run] {length}={lengths[length]} needs {needed}")


def _check_epochs(epochs: Any) -> None:
    value: Any = epochs if isinstance(epochs, Real) and not isinstance(epochs, bool) else 0
    if not 0 < value < MOST_ROWS:
        limit = " below 2**62" if value > 0 else ""
        raise PlanError(f"[run] epochs must be a positive number{limit}, got {shown(epochs)}")


def _check_number_of_epochs(run: RunPlan) -> None:
    """Refuses too many epochs: each one that ends with a short window is an entry of the plan."""
    if run.dataset_rows is None:
        return
    if run.updates is None:
        epochs = _row_limit(run) // run.dataset_rows
    else:
        largest = max(plan.real_rows for plan in run._plan_of.values())
        epochs = run.updates // divide(run.dataset_rows, largest, "pad")
    whole = all(run.dataset_rows % plan.real_rows == 0 for plan in run._plan_of.values())
    if (epochs > _MOST_EPOCHS and not whole) or run.dataset_rows * epochs > MOST_ROWS:
        length = next(f"{name}={getattr(run, name)}" for name in _LENGTHS if getattr(run, name))
        most = MOST_ROWS // run.dataset_rows if whole else min(_MOST_EPOCHS, MOST_ROWS // run.dataset_rows)
        raise PlanError(
            f"[run] {length} with dataset_rows={run.dataset_rows} goes {epochs} times through the data; a run has at "
            f"most {_MOST_EPOCHS} epochs and {MOST_ROWS} rows; use at most {most} epochs",
            [dict.fromkeys(_LENGTHS) | {"epochs": most}],
        )


def _check_ramp_up(run: RunPlan) -> None:
    """Checks that the ramp-up ends at the train plan's rows, and that each of its sizes makes a legal plan."""
    if run._ramp is None:
        return
    final = run._ramp.steps[-1][1]
    if final != run.train.rows:
        raise PlanError(
            f"[run] ramp_up ends at {final} rows but the train plan has {run.train.rows}; make them equal"
        )
    for start, rows in run._ramp.steps:
        try:
            run.train.replace(rows=rows)
        except PlanError as error:
            raise PlanError(f"[run] ramp_up: the step {start}:{rows} is not a legal plan: {error}") from None


def _check_drop(run: RunPlan) -> None:
    """Checks that dropping short windows leaves an update in every epoch, or the run would never end."""
    largest = max(plan.real_rows for plan in run._plan_of.values())
    if run.remainder == "drop" and run.dataset_rows and run.dataset_rows < largest:
        raise PlanError(
            f"[run] dataset_rows={run.dataset_rows} is less than one update of {largest} rows, "
            'and remainder="drop" drops the rest; use remainder="pad"',
            [{"remainder": "pad"}],
        )


def _check_some_updates(run: RunPlan) -> None:
    if run.total_updates == 0:
        raise PlanError(
            f"[run] {_row_limit(run)} rows are fewer than one update of {run.rows_at(0)}, and "
            'remainder="drop" drops them; use remainder="pad"',
            [{"remainder": "pad"}],
        )
