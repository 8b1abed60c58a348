"""Batch arithmetic: which rows one update consumes, and how they are cut. Plain Python, no jax.

The second of the steps data -> batch plan -> forward_backward -> gradients -> one update -> checkpoint.
`BatchPlan` cuts one update into microbatches and replicas, `RampUp` lets the rows of an update change during
a run, `RunPlan` counts the updates of a whole run, `RolloutPlan` those of reinforcement learning; `arrange` cuts rows
of known lengths by a token budget, `group_by_context` over as few devices as hold them. All are frozen, built once,
passed explicitly and refused at construction (`PlanError`, with the nearest legal choices). No size is stored in data,
model or globals.
"""

from jaxfb.batch_plan.agreement import check_same_on_all_hosts, explain_difference, explain_shift
from jaxfb.batch_plan.arrangement import Arrangement, arrange
from jaxfb.batch_plan.balance import karmarkar_karp
from jaxfb.batch_plan.by_context import RowGroup, group_by_context, padding_over_context
from jaxfb.batch_plan.plan import PURPOSES, BatchPlan, data_parallel_size
from jaxfb.batch_plan.ramp_up import RampUp
from jaxfb.batch_plan.refusal import PlanError
from jaxfb.batch_plan.rollout import PolicyUpdate, RolloutPlan, check_whole_groups
from jaxfb.batch_plan.run import RunPlan, Window, horizon_warning

__all__ = [
    "PURPOSES",
    "Arrangement",
    "BatchPlan",
    "PlanError",
    "PolicyUpdate",
    "RampUp",
    "RolloutPlan",
    "RowGroup",
    "RunPlan",
    "Window",
    "arrange",
    "check_same_on_all_hosts",
    "check_whole_groups",
    "data_parallel_size",
    "explain_difference",
    "explain_shift",
    "group_by_context",
    "horizon_warning",
    "karmarkar_karp",
    "padding_over_context",
]
