"""The settings of a plan that is cut by tokens: which widths and shapes may occur, and what is refused.

Part of the batch-plan step; `BatchPlan` calls it at construction, `arrangement.py` applies it to lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxfb.batch_plan.refusal import PlanError

BUDGET = ("sequence_length", "widths", "packing")
GRAINS = 4  # rows_per_microbatch is rounded up to quarters of the most that fit: few programs, little padding
QUARTERS = 4


def check_budget(plan: Any) -> tuple[int, ...] | None:
    """Returns the widths of a plan cut by tokens, or None for one cut by rows, which may have none of its settings."""
    if plan.max_tokens_per_microbatch is None:
        set_ = [name for name in BUDGET if getattr(plan, name)]
        if set_:
            raise PlanError(
                f"[{plan.purpose}] {', '.join(set_)} belong to a token budget; give max_tokens_per_microbatch, "
                "or leave them out",
                [{name: False if name == "packing" else None for name in set_}],
            )
        return None
    if plan.sequence_length is None:
        raise PlanError(
            f"[{plan.purpose}] max_tokens_per_microbatch={plan.max_tokens_per_microbatch} needs sequence_length, "
            "the length of the longest row"
        )
    widths = _widths(plan)
    if widths[-1] > plan.max_tokens_per_microbatch:
        padded = f" padded to {widths[-1]}" if widths[-1] != plan.sequence_length else ""
        raise PlanError(
            f"[{plan.purpose}] max_tokens_per_microbatch {plan.max_tokens_per_microbatch} < sequence_length "
            f"{plan.sequence_length}{padded}; use max_tokens_per_microbatch={widths[-1]} or more",
            [{"max_tokens_per_microbatch": widths[-1]}],
        )
    return widths


def shape_for(plan: Any, width: int, num_rows: int) -> tuple[int, int, int]:
    """Returns (width, rows_per_microbatch, num_microbatches) that hold `num_rows` array rows of one width."""
    most = plan.max_tokens_per_microbatch // width
    count = -(-num_rows // (plan.data_parallel * most))
    count = -(-count // plan.multiple_of) * plan.multiple_of
    grain = max(1, most // GRAINS)
    needed = -(-num_rows // (plan.data_parallel * count))
    return width, min(most, -(-needed // grain) * grain), count


def shapes(plan: Any) -> tuple[tuple[int, int, int], ...]:
    """Returns all shapes that can occur: any width, and any number of array rows (without packing, that of the
    rows).
    """
    if not plan.packing:
        return tuple(dict.fromkeys(shape_for(plan, width, plan.rows) for width in plan.widths))
    return tuple(dict.fromkeys(shape for width in plan.widths for shape in _packed_shapes(plan, width)))


def _packed_shapes(plan: Any, width: int) -> Iterator[tuple[int, int, int]]:
    """Yields the shapes of 1, 2, ... plan.rows array rows; goes from one shape straight to the next."""
    num_rows = 1
    while num_rows <= plan.rows:
        shape = shape_for(plan, width, num_rows)
        yield shape
        num_rows = plan.data_parallel * shape[1] * shape[2] + 1


def _widths(plan: Any) -> tuple[int, ...]:
    length = plan.sequence_length
    if plan.widths is None:
        quarter = -(-length // QUARTERS)
        return tuple(dict.fromkeys(min(length, quarter * k) for k in range(1, QUARTERS + 1)))
    widths = plan.widths
    if list(widths) != sorted(set(widths)) or widths[-1] < length:
        legal = tuple(sorted({*(w for w in widths if w < length), length}))
        raise PlanError(
            f"[{plan.purpose}] widths={list(widths)} must increase and end at sequence_length={length} or more; "
            f"use {list(legal)}",
            [{"widths": legal, "max_tokens_per_microbatch": max(length, plan.max_tokens_per_microbatch)}],
        )
    return widths
