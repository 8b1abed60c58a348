"""Rows of known lengths under a token budget: which stand in which array row, microbatch and replica.

Part of the batch-plan step. A pure function of plan and lengths, so that all hosts agree; it never changes
which rows form an update, only how they are cut.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxfb.batch_plan.balance import cost_of, karmarkar_karp
from jaxfb.batch_plan.budget import NO_BUDGET, shape_for
from jaxfb.batch_plan.plan import BatchPlan
from jaxfb.batch_plan.refusal import PlanError, not_negative
from jaxfb.refusal import shown

Bins = list[list[int]]


@dataclass(frozen=True)
class Arrangement:
    """Places the rows of one update in microbatches.

    plan:    with `rows` array rows, num_microbatches and rows_per_microbatch; same purpose.
    width:   of the array rows, in tokens.
    bins:    for each array row in the order of the plan, the rows in it, one after the other.
    lengths: of the rows.
    """

    plan: BatchPlan
    width: int
    bins: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def padding_fraction(self) -> float:
        """Returns the share of the computed tokens that belong to no row."""
        return 1 - sum(self.lengths) / (self.plan.padded_rows * self.width)


def arrange(plan: BatchPlan, lengths: Sequence[int]) -> Arrangement:
    """Cuts rows of these lengths into microbatches of at most plan.max_tokens_per_microbatch tokens.

    The width is the smallest of plan.widths that holds the longest row. With packing, rows share array rows,
    balanced over array rows and over the replicas of each microbatch.

    Raises:
      PlanError: the plan has no budget, its rows are not as many, or a row is longer than sequence_length.
    """
    if not isinstance(plan, BatchPlan):
        raise PlanError(
            f"[arrange] plan must be a BatchPlan with max_tokens_per_microbatch, got {shown(plan)}"
        )
    lengths, widths = checked_lengths(plan, lengths), plan.widths or ()
    width = widths[bisect_left(widths, max(lengths))]
    bins = pack(lengths, width) if plan.packing else [[row] for row in range(plan.rows)]
    _, per_replica, count = shape_for(plan, width, len(bins))
    total = per_replica * count * plan.data_parallel
    if plan.packing:
        bins = _in_order(_balanced(lengths, width, total, bins), lengths, plan.data_parallel, per_replica)
    bins += [[] for _ in range(total - len(bins))]
    cut = dataclasses.replace(
        plan,
        rows=total,
        rows_per_microbatch=per_replica,
        num_microbatches=count,
        remainder="pad",  # some array rows may be blank
        **NO_BUDGET,
    )
    made = Arrangement(cut, width, tuple(map(tuple, bins)), tuple(lengths))
    _check_made(made, plan)
    return made


def pack(lengths: Sequence[int], width: int) -> Bins:
    """Packs rows into few array rows: best fit, longest first."""
    bins: Bins = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        fitting = [(free[b], b) for b in range(len(bins)) if free[b] >= lengths[row]]
        if fitting:
            chosen = min(fitting)[1]
        else:
            chosen = len(bins)
            bins.append([])
            free.append(width)
        bins[chosen].append(row)
        free[chosen] -= lengths[row]
    return bins


def _balanced(lengths: Sequence[int], width: int, total: int, packed: Bins) -> Bins:
    """Spreads rows evenly over `total` array rows; returns `packed` where an even spread does not fit."""
    spread = karmarkar_karp([cost_of(length) for length in lengths], total)
    fits = all(sum(lengths[row] for row in bin_) <= width for bin_ in spread)
    return spread if fits else packed + [[] for _ in range(total - len(packed))]


def _in_order(bins: Bins, lengths: Sequence[int], replicas: int, per_replica: int) -> Bins:
    """Puts array rows of similar work into one microbatch and shares its work out evenly over the replicas."""
    cost = [sum(cost_of(lengths[row]) for row in bin_) for bin_ in bins]
    order = sorted(range(len(bins)), key=lambda b: (-cost[b], b))
    ordered: Bins = []
    for first in range(0, len(order), replicas * per_replica):
        block = order[first : first + replicas * per_replica]
        shares = karmarkar_karp([cost[b] for b in block], replicas, equal_counts=True)
        ordered += [bins[block[i]] for share in shares for i in share]
    return ordered


def checked_lengths(plan: BatchPlan, lengths: Any) -> list[int]:
    """Returns `lengths` as integers, one for each row of a plan by tokens."""
    if not plan.by_tokens:
        raise PlanError(
            f'plan "{plan.purpose}" has no max_tokens_per_microbatch; lengths are for a token budget only'
        )
    lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(lengths, list | tuple | range):
        raise PlanError(
            f"[{plan.purpose}] lengths must be a list of integers, one for each row, got {shown(lengths)}"
        )
    if len(lengths) != plan.rows:
        raise PlanError(f'plan "{plan.purpose}" covers {plan.rows} rows, batch has {len(lengths)} lengths')
    lengths = [not_negative(plan.purpose, "each of lengths", length) for length in lengths]
    widest = plan.widths[-1] if plan.widths else 0
    for row, length in enumerate(lengths):
        if length > widest:
            raise PlanError(
                f"[{plan.purpose}] lengths: row {row} has {length} tokens, above sequence_length "
                f"{plan.sequence_length} (widest array row {widest}); cut it, or raise sequence_length and "
                "max_tokens_per_microbatch"
            )
    return lengths


def _check_made(made: Arrangement, plan: BatchPlan) -> None:
    """Raises on mistakes of jaxfb itself: a row lost or repeated, or a microbatch above its budget."""
    rows = sorted(row for bin_ in made.bins for row in bin_)
    fullest = max(sum(made.lengths[row] for row in bin_) for bin_ in made.bins)
    tokens = made.width * made.plan.rows_per_microbatch
    within = fullest <= made.width and tokens <= (plan.max_tokens_per_microbatch or 0)
    if rows != list(range(plan.rows)) or not within or len(made.bins) != made.plan.padded_rows:
        raise RuntimeError(f"jaxfb arranged rows wrongly: lengths {made.lengths}, bins {made.bins}, {plan}")
