"""Batch plans with one wrong argument: refused in a sentence that names it, whatever the value."""

import pytest
from legal import boolean, integers, maybe, nothing, numbers, one_of, positive_int, texts
from wrong import Call, circular, pool

from jaxfb.batch_plan import (
    PURPOSES,
    BatchPlan,
    RampUp,
    RolloutPlan,
    RunPlan,
    arrange,
    data_parallel_size,
    group_by_context,
    padding_over_context,
)
from jaxfb.batch_plan.plan import REMAINDERS

PLAN = BatchPlan(rows=8, rows_per_microbatch=2)
BY_TOKENS = BatchPlan(rows=3, max_tokens_per_microbatch=16, sequence_length=8, packing=True)
OVER_CONTEXT = BY_TOKENS.replace(max_context=2)
RUN = RunPlan(PLAN, updates=5, dataset_rows=20)
RAMP = RampUp(((0, 4), (8, 8)))
ROLLOUT = dict(plans={"train": PLAN}, prompts=4, samples_per_prompt=4, rows_per_update=8)
TOKENS = integers(most=2**62)

BUDGET = dict(rows=8, max_tokens_per_microbatch=64, sequence_length=16)
SIZES = {"rows": maybe(positive_int), "data_parallel": positive_int, "multiple_of": positive_int}


def _lengths(value):
    return isinstance(value, range) or (hasattr(value, "shape") and value.shape == (3,))


SHORT = {"data_parallel": "dp"}
CUTS = {
    "purpose": one_of(PURPOSES),
    "remainder": one_of(REMAINDERS),
    "rows_per_microbatch": maybe(positive_int),
    "num_microbatches": maybe(positive_int),
    "max_tokens_per_microbatch": maybe(positive_int),
    "sequence_length": maybe(positive_int),
    "widths": maybe(lambda value: _ints(value)),
    "packing": boolean,
    "max_context": maybe(positive_int),
}


def _ints(value):
    return isinstance(value, list | tuple | range) and all(map(positive_int, value))


CALLS = [
    Call(
        "BatchPlan",
        BatchPlan,
        lambda: dict(rows=64, rows_per_microbatch=2, data_parallel=4),
        SIZES | CUTS,
        SHORT,
    ),
    Call("BatchPlan by tokens", BatchPlan, lambda: dict(BUDGET), SIZES | CUTS, SHORT, use=BatchPlan.summary),
    Call(
        "BatchPlan.replace",
        PLAN.replace,
        lambda: {},
        SIZES | {"rows_per_microbatch": maybe(positive_int)},
        SHORT,
    ),
    Call(
        "BatchPlan.rows_of",
        PLAN.rows_of,
        lambda: dict(microbatch=1, replica=0),
        {"microbatch": integers(0), "replica": integers(0)},
    ),
    Call("BatchPlan.check_rows", PLAN.check_rows, lambda: dict(rows=8), {"rows": integers(0)}),
    Call(
        "BatchPlan.require",
        lambda purpose: PLAN.require(purpose),
        lambda: dict(purpose="train"),
        {"purpose": one_of(PURPOSES)},
    ),
    Call(
        "data_parallel_size",
        data_parallel_size,
        lambda: dict(devices=8, tensor=2, pipe=2),
        dict.fromkeys(("devices", "tensor", "pipe", "context"), positive_int),
        {"tensor": "tp", "pipe": "pp", "context": "cp"},
    ),
    Call(
        "RunPlan",
        RunPlan,
        lambda: dict(plans=PLAN, updates=5),
        {
            "plans": nothing,
            "updates": maybe(positive_int),
            "samples": maybe(TOKENS),
            "tokens": maybe(TOKENS),
            "epochs": maybe(numbers(above=0)),
            "dataset_rows": maybe(TOKENS),
            "sequence_length": maybe(positive_int),
            "ramp_up": maybe(nothing),
            "remainder": one_of(REMAINDERS),
        },
        use=RunPlan.table,
    ),
    *(
        Call(
            f"RunPlan by {name}",
            RunPlan,
            lambda name=name, needs=needs: {"plans": PLAN, name: 5000, **needs},
            {name: maybe(rule)} | dict.fromkeys(needs, maybe(TOKENS)),
            use=RunPlan.table,
        )
        for name, needs, rule in (
            ("epochs", {"dataset_rows": 50}, numbers(above=0)),
            ("tokens", {"sequence_length": 50}, TOKENS),
            ("samples", {"dataset_rows": 50}, TOKENS),
            ("updates", {"dataset_rows": 50}, positive_int),
        )
    ),
    Call("RunPlan.window", RUN.window, lambda: dict(update=2), {"update": integers(0)}),
    Call(
        "RunPlan.windows",
        lambda first: list(RUN.windows(first)),
        lambda: dict(first=2),
        {"first": integers(0)},
    ),
    Call(
        "RunPlan.rows_at", RUN.rows_at, lambda: dict(consumed_rows=2), {"consumed_rows": integers(0, 10**400)}
    ),
    Call(
        "RunPlan.plan_at", RUN.plan_at, lambda: dict(consumed_rows=2), {"consumed_rows": integers(0, 10**400)}
    ),
    Call("RampUp", RampUp, lambda: dict(steps=((0, 4), (8, 8))), {"steps": nothing}),
    Call(
        "RampUp.parse",
        RampUp.parse,
        lambda: dict(text="0:4 8:8"),
        {"text": nothing, "sequence_length": maybe(positive_int)},
    ),
    Call(
        "RampUp.linear",
        RampUp.linear,
        lambda: dict(start=4, increment=4, samples=100, rows=16),
        {"start": positive_int, "increment": positive_int, "samples": TOKENS, "rows": positive_int},
    ),
    Call(
        "RampUp.rows_at", RAMP.rows_at, lambda: dict(consumed_rows=2), {"consumed_rows": integers(0, 10**400)}
    ),
    Call(
        "RampUp.next_change",
        RAMP.next_change,
        lambda: dict(consumed_rows=2),
        {"consumed_rows": integers(0, 10**400)},
    ),
    Call(
        "RolloutPlan",
        RolloutPlan,
        lambda: dict(ROLLOUT),
        {
            "plans": nothing,
            "prompts": positive_int,
            "samples_per_prompt": positive_int,
            "rows_per_update": positive_int,
            "epochs": positive_int,
            "rollouts": positive_int,
            "seed": maybe(integers(-(2**63), 2**63)),
            "groups": texts,
            "whole_groups": boolean,
        },
        use=RolloutPlan.table,
    ),
    Call(
        "RolloutPlan.update", RolloutPlan(**ROLLOUT).update, lambda: dict(number=1), {"number": integers(0)}
    ),
    Call(
        "RolloutPlan.plan",
        RolloutPlan(**ROLLOUT).plan,
        lambda: dict(purpose="train"),
        {"purpose": one_of(PURPOSES)},
    ),
    Call(
        "arrange",
        arrange,
        lambda: dict(plan=BY_TOKENS, lengths=[3, 4, 5]),
        {"plan": nothing, "lengths": _lengths},
    ),
    *(
        Call(
            function.__name__,
            function,
            lambda: dict(plan=OVER_CONTEXT, lengths=[3, 4, 5]),
            {"plan": nothing, "lengths": _lengths},
        )
        for function in (group_by_context, padding_over_context)
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    call()
    assert not call.failures([*pool(seed=1), circular])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()
