"""rows = data_parallel * rows_per_microbatch * num_microbatches: solved, or explained why it cannot be.

Part of the batch-plan step; `BatchPlan` calls it once, at construction. `given` is a dict of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfb.batch_plan.refusal import PlanError, around, nearest, offer

SIZES = ("rows", "rows_per_microbatch", "num_microbatches")


def divide(rows: int, unit: int, remainder: str) -> int:
    """Divides rows by unit: rounded up for "pad", down for "drop"; for "error" 0 where it does not divide."""
    if remainder == "pad":
        return -(-rows // unit)
    return 0 if remainder == "error" and rows % unit else rows // unit


def solve(given: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Solves for (rows, rows_per_microbatch, num_microbatches) from any two of them; None where they do not fit."""
    rows, per_replica, count = (given[name] for name in SIZES)
    replicas, remainder = given["data_parallel"], given["remainder"]
    if rows is None:
        rows = replicas * per_replica * count
    if per_replica is None:
        per_replica = divide(rows, replicas * count, remainder)
    found = divide(rows, replicas * per_replica, remainder) if per_replica else 0
    fits = found and found % given["multiple_of"] == 0 and count in (None, found)
    return (rows, per_replica, found) if fits else None


def misfit(given: Mapping[str, Any]) -> PlanError:
    """Explains sizes that `solve` found no solution for, and offers the nearest that have one."""
    choices = _choices(given)
    sentence, subject = _reason(given)
    return PlanError(f"[{given['purpose']}] {sentence}{offer(choices, subject)}", choices)


def _reason(given: Mapping[str, Any]) -> tuple[str, str]:
    """Returns what does not fit, and which argument the sentence is about ("" for none)."""
    rows, per_replica, count = (given[name] for name in SIZES)
    replicas, multiple_of, remainder = given["data_parallel"], given["multiple_of"], given["remainder"]
    update = "update" if given["purpose"] in ("train", "critic") else "batch"
    if count and count % multiple_of:
        return f"{count} microbatches is not a multiple of multiple_of {multiple_of}", "num_microbatches"
    if count and per_replica:
        return _disagreement(rows, per_replica, count, replicas, remainder), ""
    unit = replicas * (per_replica or count)
    part = f"dp {replicas} × {per_replica or f'{count} microbatches'} = {unit}"
    if rows < unit and remainder != "pad":
        one = "one microbatch is" if per_replica else "one row in each is"
        return f"{one} {part} rows but the {update} has {rows}", ""
    if rows % unit and remainder == "error":
        sum_of = f"{rows // unit}×{unit} + {rows % unit}"
        return f"{rows} rows per {update} is not a multiple of {part} ({sum_of})", "rows"
    found = divide(rows, unit, remainder)
    if per_replica:
        legal = " or ".join(map(str, around(found, multiple_of)))
        cut = f"{found} microbatches (of {part} rows)"
        return f"{cut} is not a multiple of multiple_of {multiple_of}, {legal} would be", ""
    cut = divide(rows, replicas * found, remainder)
    return f"{rows} rows in microbatches of dp {replicas} × {found} rows make {cut}, not {count}", ""


def _disagreement(rows: int, per_replica: int, count: int, replicas: int, remainder: str) -> str:
    unit = replicas * per_replica
    rounded = divide(rows, unit, remainder) * unit
    rounding = f" ({remainder}: {rounded})" if rounded not in (0, rows) else ""
    product = f"dp {replicas} × {per_replica} rows × {count} microbatches = {unit * count}"
    return f"{rows} rows{rounding} ≠ {product}; drop one of the three"


def _choices(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the nearest changes of one argument that fit, and of two where one is not enough or goes far."""
    alone = _rows_alone(given) + _cut_alone(given)
    rows, per_replica, count = (given[name] for name in SIZES)
    parts = given["data_parallel"] * (per_replica or count)
    only_more_rows = not count and rows < parts and len(alone) == 1
    # a smaller cut suits few rows better, if there is one
    if given["remainder"] == "error" and rows and (rows > parts or not _cut_alone(given)):
        alone += [{"remainder": "pad"}] if solve({**given, "remainder": "pad"}) else []
    return alone if alone and not only_more_rows else alone + _pairs(given)


def _rows_alone(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns other rows for the same cut, needing no padding."""
    rows, per_replica, count = (given[name] for name in SIZES)
    if rows is None:
        return []
    unit = given["data_parallel"] * (per_replica or 1) * (count or given["multiple_of"])
    exact = (unit,) if per_replica and count else around(rows, unit)
    return [{"rows": legal} for legal in exact if solve({**given, "rows": legal, "remainder": "error"})]


def _cut_alone(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns another rows_per_microbatch, or another num_microbatches, for the same rows."""
    choices = []
    for name in SIZES[1:]:
        if (value := given[name]) is not None:
            rows, replicas = given["rows"], given["data_parallel"]
            highest = divide(rows, replicas, "pad") if rows else value + given["multiple_of"]
            legal = nearest(value, highest, lambda v, name=name: solve({**given, name: v}) is not None)
            choices += [{name: v} for v in legal]
    return choices


def _pairs(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Yields changes of the cut and of the rows together."""
    rows, per_replica, count = (given[name] for name in SIZES)
    replicas, multiple_of = given["data_parallel"], given["multiple_of"]
    if count is None:
        unit = replicas * multiple_of
        return [{"rows_per_microbatch": legal // unit, "rows": legal} for legal in around(rows, unit)]
    pairs = []
    for legal_count in around(count, multiple_of):
        unit = replicas * legal_count * (per_replica or 1)
        exact = (unit,) if per_replica else around(rows, unit)
        pairs += [{"num_microbatches": legal_count, "rows": legal} for legal in exact]
    return pairs
