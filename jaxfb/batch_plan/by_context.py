"""Rows of known lengths on as few context devices as hold them: groups of one width and one context size each.

Part of the batch-plan step. A pure function of plan and lengths, so that all hosts agree; it never changes which rows
form an update, only how they are cut.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from jaxfb.batch_plan.arrangement import arrange, checked_lengths, pack
from jaxfb.batch_plan.budget import context_sizes, shape_for, with_context
from jaxfb.batch_plan.plan import BatchPlan
from jaxfb.batch_plan.refusal import PlanError
from jaxfb.refusal import shown


@dataclass(frozen=True)
class RowGroup:
    """Holds the rows of one update that are cut over equally many devices.

    context: devices that a row is cut over.
    rows:    which rows of the update.
    plan:    by tokens, for these rows alone; its replicas are those of a mesh with that context axis.
    """

    context: int
    rows: tuple[int, ...]
    plan: BatchPlan


def group_by_context(plan: BatchPlan, lengths: Sequence[int]) -> tuple[RowGroup, ...]:
    """Groups rows of these lengths by the smallest width that holds them, and chooses each group's context devices.

    Of the sizes whose share of the budget holds a row, that one is chosen with which a device computes the fewest
    tokens, padding included, and of equals the smallest: few devices a row need little communication, many leave fewer
    replicas to fill up where rows are few.

    Raises:
      PlanError: the plan has no max_context, its rows are not as many, or a row is longer than sequence_length.
    """
    if not isinstance(plan, BatchPlan) or plan.max_context is None:
        raise PlanError(f"[group_by_context] plan must be a BatchPlan with max_context, got {shown(plan)}")
    lengths, widths = checked_lengths(plan, lengths), plan.widths or ()
    places = [bisect_left(widths, length) for length in lengths]
    of_width = {
        width: tuple(row for row, at in enumerate(places) if at == place)
        for place, width in enumerate(widths)
    }
    return tuple(_group(plan, width, rows, lengths) for width, rows in of_width.items() if rows)


def padding_over_context(plan: BatchPlan, lengths: Sequence[int]) -> float:
    """Returns the share of padding in the tokens computed for rows of these lengths; raises as `group_by_context`."""
    groups = group_by_context(plan, lengths)
    made = [arrange(group.plan, [lengths[row] for row in group.rows]) for group in groups]
    return 1 - sum(lengths) / sum(one.plan.padded_rows * one.width for one in made)


def _group(plan: BatchPlan, width: int, rows: tuple[int, ...], lengths: Sequence[int]) -> RowGroup:
    """Returns these rows with the number of devices that computes them soonest."""
    number = len(pack([lengths[row] for row in rows], width)) if plan.packing else len(rows)
    of_rows = dataclasses.replace(plan, rows=len(rows))
    sizes = context_sizes(plan, width)
    choices = [RowGroup(size, rows, with_context(of_rows, width, size)) for size in sizes]
    return min(choices, key=lambda group: (_tokens_a_device(group, width, number), group.context))


def _tokens_a_device(group: RowGroup, width: int, number: int) -> float:
    """Returns the tokens that a device computes of so many array rows."""
    _, per_replica, count = shape_for(group.plan, width, number)
    return per_replica * count * width / group.context
