"""The settings of a plan that is cut by tokens: which widths and shapes may occur, and what is refused.

Part of the batch-plan step; `BatchPlan` calls it at construction, `arrangement.py` applies it to lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import isqrt
from typing import Any

from jaxfb.batch_plan.refusal import PlanError

BUDGET = {"sequence_length": None, "widths": None, "packing": False, "max_context": None}
"""The settings that belong to a token budget, and their values without one."""
NO_BUDGET = {"max_tokens_per_microbatch": None, **BUDGET}
"""The changes that make a plan by tokens one by rows."""
GRAINS = 4  # rows_per_microbatch is rounded up to quarters of the most that fit: few programs, little padding
QUARTERS = 4


def check_budget(plan: Any) -> tuple[int, ...] | None:
    """Returns the widths of a plan cut by tokens, or None for one cut by rows, which may have none of its settings."""
    if plan.max_tokens_per_microbatch is None:
        _check_no_budget(plan)
        return None
    if plan.sequence_length is None:
        raise PlanError(
            f"[{plan.purpose}] max_tokens_per_microbatch={plan.max_tokens_per_microbatch} needs sequence_length, "
            "the length of the longest row"
        )
    widths = _widths(plan)
    _check_context(plan, widths)
    if widths[-1] > plan.max_tokens_per_microbatch:
        padded = f" padded to {widths[-1]}" if widths[-1] != plan.sequence_length else ""
        raise PlanError(
            f"[{plan.purpose}] max_tokens_per_microbatch {plan.max_tokens_per_microbatch} < sequence_length "
            f"{plan.sequence_length}{padded}; use max_tokens_per_microbatch={widths[-1]} or more",
            [{"max_tokens_per_microbatch": widths[-1]}],
        )
    return widths


def _check_no_budget(plan: Any) -> None:
    """Refuses settings of a token budget in a plan without one."""
    given = [name for name in BUDGET if getattr(plan, name)]
    if given:
        belong, them = ("belongs", "it") if len(given) == 1 else ("belong", "them")
        raise PlanError(
            f"[{plan.purpose}] {', '.join(given)} {belong} to a token budget; use max_tokens_per_microbatch instead "
            f"of a number of rows or microbatches, or leave {them} out",
            [{name: BUDGET[name] for name in given}],
        )


def context_sizes(plan: Any, width: int) -> tuple[int, ...]:
    """Returns the numbers of context devices that rows of this width may be cut over, each in two pieces a device, so
    that the share of the budget holds one row; rising.
    """
    return _sizes(plan.max_context, plan.max_tokens_per_microbatch, width)


def _sizes(max_context: int, tokens: int, width: int) -> tuple[int, ...]:
    """Returns what `context_sizes` does for a budget of so many tokens."""
    small = [size for size in range(1, isqrt(max_context) + 1) if max_context % size == 0]
    sizes = sorted({*small, *(max_context // size for size in small)})
    fit = (size for size in sizes if _share(max_context, tokens, size) >= width)
    return tuple(size for size in fit if size == 1 or width % (2 * size) == 0)


def share_of(plan: Any, context: int) -> int:
    """Returns the most tokens of a microbatch that is cut over so many of the plan's context devices."""
    return _share(plan.max_context, plan.max_tokens_per_microbatch, context)


def _share(max_context: int, tokens: int, context: int) -> int:
    return tokens * context // max_context


def with_context(plan: Any, width: int, context: int) -> Any:
    """Returns the plan for rows of one width on a mesh whose context axis has so many devices."""
    return dataclasses.replace(
        plan,
        data_parallel=plan.data_parallel * plan.max_context // context,
        max_tokens_per_microbatch=share_of(plan, context),
        sequence_length=width,
        widths=(width,),
        max_context=None,
    )


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
    if plan.max_context:
        return tuple(shape for width in plan.widths for shape in _shapes_over_context(plan, width))
    if not plan.packing:
        return tuple(dict.fromkeys(shape_for(plan, width, plan.rows) for width in plan.widths))
    return tuple(dict.fromkeys(shape for width in plan.widths for shape in _packed_shapes(plan, width)))


def _shapes_over_context(plan: Any, width: int) -> Iterator[tuple[int, int, int]]:
    """Yields the shapes of 1, 2, ... plan.rows array rows for each number of context devices."""
    for size in context_sizes(plan, width):
        yield from _packed_shapes(with_context(plan, width, size), width)


def _packed_shapes(plan: Any, width: int) -> Iterator[tuple[int, int, int]]:
    """Yields the shapes of 1, 2, ... plan.rows array rows; goes from one shape straight to the next."""
    num_rows = 1
    while num_rows <= plan.rows:
        shape = shape_for(plan, width, num_rows)
        yield shape
        num_rows = plan.data_parallel * shape[1] * shape[2] + 1


def _check_context(plan: Any, widths: tuple[int, ...]) -> None:
    """Refuses widths that no number of context devices can share."""
    width = _not_cut(plan, widths)
    if width is None:
        return
    choice, words = _widths_with_budget(plan, widths)
    small = widths[-1] > plan.max_tokens_per_microbatch
    budget = {"max_tokens_per_microbatch": widths[-1]} if small else {}
    raised = f" and max_tokens_per_microbatch={widths[-1]}" if small else ""
    raise PlanError(
        f"[{plan.purpose}] rows of width {width} cannot be cut over max_context={plan.max_context} or fewer devices, "
        f"each of which takes two equal pieces; use widths={words}, or max_context=None{raised}",
        [choice, {"max_context": None, **budget}],
    )


def _not_cut(plan: Any, widths: tuple[int, ...]) -> int | None:
    """Returns a width that no number of context devices can share even where the budget holds every row, if any."""
    if plan.max_context is None:
        return None
    tokens = max(widths[-1], plan.max_tokens_per_microbatch)
    return next((width for width in widths if not _sizes(plan.max_context, tokens, width)), None)


def _widths_with_budget(plan: Any, widths: tuple[int, ...]) -> tuple[dict[str, Any], str]:
    """Returns the nearest widths that the plan's context devices can share, with a budget for them, and in words."""
    if _not_cut(plan, widths):
        pieces = 2 * plan.max_context
        widths = tuple(dict.fromkeys(-(-one // pieces) * pieces for one in widths))
    tokens = max(widths[-1], plan.max_tokens_per_microbatch)
    raised = f" and max_tokens_per_microbatch={tokens}" if tokens > plan.max_tokens_per_microbatch else ""
    return {"widths": widths, "max_tokens_per_microbatch": tokens}, f"{list(widths)}{raised}"


def _widths(plan: Any) -> tuple[int, ...]:
    length = plan.sequence_length
    if plan.widths is None:
        quarter = -(-length // QUARTERS)
        return tuple(dict.fromkeys(min(length, quarter * k) for k in range(1, QUARTERS + 1)))
    widths = plan.widths
    if list(widths) != sorted(set(widths)) or widths[-1] < length:
        choice, words = _widths_with_budget(plan, tuple(sorted({*(w for w in widths if w < length), length})))
        raise PlanError(
            f"[{plan.purpose}] widths={list(widths)} must increase and end at sequence_length={length} or more; "
            f"use {words}",
            [choice],
        )
    return widths
