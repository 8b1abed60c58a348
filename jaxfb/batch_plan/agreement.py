"""Checks whether two plans train the same rows: after a restart, and on every host.

Part of the batch-plan step. Which rows form an update is decided by rows, seed and order; how they are cut
(replicas, rows per microbatch, number of microbatches) may change without changing the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfb.batch_plan.budget import NO_BUDGET
from jaxfb.batch_plan.fit import SIZES
from jaxfb.batch_plan.plan import BatchPlan, fingerprint_of
from jaxfb.batch_plan.refusal import PlanError
from jaxfb.batch_plan.run import RunPlan

_CUTS = (*SIZES, *NO_BUDGET, "data_parallel", "multiple_of", "remainder")


def explain_difference(saved: Mapping[str, Any], plan: BatchPlan, **order: Any) -> str | None:
    """Returns why a run saved with another plan may not continue with this one; None if it may.

    saved: `plan.to_dict()` of the saved run, with the same extra keys as `order` (such as seed and order).
    Real rows of an update and every extra must agree; the cut into replicas and microbatches may change.
    """
    old, new = _what_decides(saved), _what_decides({**plan.to_dict(), **order})
    different = _differences(old, new)
    if not different:
        return None
    return (
        f"[{plan.purpose}] resuming would train on other rows than the saved run: {different} (saved vs now); "
        "data_parallel, rows_per_microbatch and num_microbatches may change, these may not"
    )


def explain_shift(plan: RunPlan, update: int, consumed_rows: int) -> str | None:
    """Returns why a run saved after so many updates and rows may not continue with this plan; None if it may.

    Where another length cuts another window short, rows would be passed over or read twice. Rows that the plan drops
    behind the last window are none of these.
    """
    if not 0 < update < plan.total_updates:
        return None
    end = plan.window(update - 1).end
    if end == consumed_rows:
        return None
    return (
        f"[run] the saved run consumed {consumed_rows} rows in {update} updates, by this config they would be {end}: "
        "an update has fewer rows at the end of a run or of an epoch, and this config moves that end; resume with the "
        "saved run's length and as many rows of data"
    )


def check_same_on_all_hosts(fingerprints: Sequence[Mapping[str, Any]]) -> None:
    """Refuses to start when hosts hold different plans: they would wait for each other forever.

    fingerprints[h]: `plan.to_dict()` of host h, gathered before any other collective.
    """
    names = [fingerprint_of(values) for values in fingerprints]
    for host, name in enumerate(names):
        if name != names[0]:
            different = _differences(fingerprints[host], fingerprints[0])
            raise PlanError(f"host {host} plan fingerprint {name} ≠ host 0 {names[0]}: {different}")


def _what_decides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what may not change on resume: the rows an update really consumes, and all that is not a cut."""
    sizes = ("rows", "rows_per_microbatch", "data_parallel", "num_microbatches")
    rows, per_replica, replicas, count = (values[name] for name in sizes)
    kept = {name: value for name, value in values.items() if name not in _CUTS}
    real = rows if per_replica is None else min(rows, per_replica * replicas * count)
    # Saved values have been through JSON, where a tuple becomes a list.
    return json.loads(json.dumps({"rows": real, **kept}))


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = dict.fromkeys([*one, *other])
    pairs = ((name, one.get(name, "absent"), other.get(name, "absent")) for name in names)
    return ", ".join(f"{name} {a} vs {b}" for name, a, b in pairs if a != b)
