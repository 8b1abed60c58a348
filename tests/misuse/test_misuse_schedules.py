"""Schedules with one wrong argument: refused in a sentence that names it, and quickly whatever the size."""

import pytest
from legal import integers, maybe, nothing, numbers, one_of, positive_int, texts
from wrong import Call, circular, pool

from jaxfb import schedules
from jaxfb.schedules import Schedule, make

ONE = make("1f1b", 2, 4)
TABLE = [["F0", None], ["F1", "F0+B0"], [None, "F1+B1"], ["B0", None], ["B1", None]]
TEXT = ONE.render()
COST = numbers(least=0)
COSTS = {"forward": COST, "backward_input": COST, "backward_weight": COST}
SIZES = {"num_stages": positive_int, "num_microbatches": positive_int, "num_chunks": positive_int}
PLACEMENT = one_of(("loop", "v"))


def _summary_of_a_small_one(schedule):
    return schedule.num_ticks < 200 and schedule.summary()


CALLS = [
    *(
        Call(
            f"schedules.make {name}",
            make,
            lambda name=name, chunks=chunks: dict(
                name=name, num_stages=2, num_microbatches=4, num_chunks=chunks
            ),
            {"name": one_of(schedules.NAMES), **SIZES},
            {"name": r"\[schedule\]"},
            use=_summary_of_a_small_one,
        )
        for name, chunks in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("zero_bubble", 2),
            ("v_shape", 2),
        )
    ),
    Call(
        "schedules.check_name",
        schedules.check_name,
        lambda: dict(name="gpipe"),
        {"name": one_of(schedules.NAMES)},
        {"name": r"\[schedule\]"},
    ),
    Call(
        "Schedule.from_table",
        Schedule.from_table,
        lambda: dict(table=TABLE),
        {"table": nothing, "name": texts, "placement": PLACEMENT},
    ),
    Call(
        "Schedule.from_table, a cell",
        lambda cell: Schedule.from_table([[cell, None], *TABLE[1:]]),
        lambda: dict(cell="F0"),
        {"cell": one_of([["F0.0"]])},
        {"cell": "table|device"},
    ),
    Call(
        "Schedule.from_text",
        Schedule.from_text,
        lambda: dict(text=TEXT),
        {"text": nothing, "name": texts, "placement": maybe(PLACEMENT)},
    ),
    Call("Schedule.simulate", ONE.simulate, dict, {**COSTS, "head": COST}),
    Call("Schedule.summary", ONE.summary, dict, {**COSTS, "head": COST}),
    Call("Schedule.render", ONE.render, dict, {"width": positive_int}),
    Call(
        "Schedule.stage_of",
        ONE.stage_of,
        lambda: dict(device=1, chunk=0),
        {"device": integers(0, 1), "chunk": integers(0, 0)},
    ),
    Call("Schedule.device_chunk_of", ONE.device_chunk_of, lambda: dict(stage=1), {"stage": integers(0, 1)}),
    Call(
        "schedules.megatron_order",
        schedules.megatron_order,
        lambda: dict(num_stages=2, num_microbatches=4, num_chunks=2),
        {
            **SIZES,
            "group_size": maybe(positive_int),
            "interleaved": one_of((None, True, False)),
            "forward_only": one_of((True, False)),
        },
    ),
    Call(
        "schedules.megatron_time",
        schedules.megatron_time,
        lambda: dict(ranks=schedules.megatron_order(2, 4), forward=1, backward=2),
        {"ranks": nothing, "forward": COST, "backward": COST},
    ),
    Call(
        "schedules.comparison",
        schedules.comparison,
        lambda: dict(num_stages=2, num_microbatches=4, num_chunks=2),
        {**SIZES, **COSTS},
        use=schedules.comparison_table,
    ),
    Call(
        "schedules.comparison_table",
        schedules.comparison_table,
        lambda: dict(rows=schedules.comparison(2, 4)),
        {"rows": one_of([[], ()])},
    ),
]


@pytest.mark.parametrize(
    "call",
    [pytest.param(c, marks=[pytest.mark.slow] * (c.name == "schedules.comparison")) for c in CALLS],
    ids=lambda call: call.name,
)
def test_one_wrong_argument_is_refused_by_name(call):
    call()
    assert not call.failures([*pool(seed=2), circular])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()
