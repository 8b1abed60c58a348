"""Batch arithmetic: consistent, contiguous, equal to Megatron-LM's, and never refused without a way out."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxfb.batch_plan
from jaxfb.batch_plan import (
    BatchPlan,
    PlanError,
    RampUp,
    RunPlan,
    check_same_on_all_hosts,
    data_parallel_size,
    explain_difference,
    explain_shift,
    horizon_warning,
)
from jaxfb.batch_plan import run as run_plans
from jaxfb.batch_plan.ramp_up import as_ramp_up

small = st.integers(1, 40)
maybe = st.none() | small
arguments = st.fixed_dictionaries(
    {
        "rows": st.none() | st.integers(1, 300),
        "rows_per_microbatch": maybe,
        "num_microbatches": maybe,
        "data_parallel": st.integers(1, 8),
        "multiple_of": st.integers(1, 4),
        "remainder": st.sampled_from(["error", "pad", "drop"]),
    }
).filter(lambda a: [a["rows"], a["rows_per_microbatch"], a["num_microbatches"]].count(None) < 2)


def refusal(call, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, PlanError)
    return caught.value


def is_legal(**kwargs):
    try:
        return bool(BatchPlan(**kwargs))
    except PlanError:
        return False


@given(arguments)
@settings(max_examples=400, deadline=None)
def test_a_plan_is_consistent_or_refused_with_choices_that_are_accepted(given):
    try:
        plan = BatchPlan(**given)
    except PlanError as error:
        assert error.choices
        for choice in error.choices:
            assert BatchPlan(**{**given, **choice}), (given, choice)
            assert all(str(value) in str(error) for value in choice.values())
        return
    cut = plan.data_parallel * plan.rows_per_microbatch * plan.num_microbatches
    assert plan.padded_rows == cut == plan.rows_per_global_microbatch * plan.num_microbatches
    assert plan.num_microbatches % plan.multiple_of == 0
    assert abs(plan.rows - cut) < plan.rows_per_global_microbatch
    assert {"error": plan.rows == cut, "pad": plan.rows <= cut, "drop": plan.rows >= cut}[plan.remainder]
    assert plan.real_rows + plan.padding_rows == cut and plan.real_rows <= plan.rows
    for name in ("rows", "rows_per_microbatch", "num_microbatches"):
        assert given[name] in (None, getattr(plan, name))
    assert BatchPlan(**json.loads(json.dumps(plan.to_dict()))) == plan


@given(st.integers(1, 100), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_choices_are_the_nearest(rows, rows_per_microbatch, data_parallel, multiple_of):
    given = {
        "rows": rows,
        "rows_per_microbatch": rows_per_microbatch,
        "data_parallel": data_parallel,
        "multiple_of": multiple_of,
    }
    assume(not is_legal(**given))
    single = [choice for choice in refusal(BatchPlan, **given).choices if len(choice) == 1]
    highest = {"rows": rows + data_parallel * rows_per_microbatch * multiple_of, "rows_per_microbatch": rows}
    for name, top in highest.items():
        offered = [choice[name] for choice in single if name in choice]
        legal = [value for value in range(1, top + 1) if is_legal(**{**given, name: value})]
        below = [value for value in legal if value < given[name]][-1:]
        above = [value for value in legal if value > given[name]][:1]
        assert offered == below + above


def test_where_no_change_alone_is_legal_two_together_are_offered():
    given = {"rows": 1, "num_microbatches": 3, "multiple_of": 2}
    choices = refusal(BatchPlan, **given).choices
    assert choices == ({"num_microbatches": 2, "rows": 2}, {"num_microbatches": 4, "rows": 4})
    assert all(is_legal(**given | choice) for choice in choices)


@given(st.integers(1, 300), small, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_rows_of_partitions_the_rows_in_megatron_order(rows, rows_per_microbatch, data_parallel):
    cut = {"rows_per_microbatch": rows_per_microbatch, "data_parallel": data_parallel}
    plan = BatchPlan(rows=rows, remainder="pad", **cut)
    cells = itertools.product(range(plan.num_microbatches), range(plan.data_parallel))
    rows = [row for microbatch, replica in cells for row in plan.rows_of(microbatch, replica)]
    assert rows == list(range(plan.padded_rows))
    refusal(plan.rows_of, plan.num_microbatches, 0)
    refusal(plan.rows_of, 0, -1)


REFUSED = [
    (
        dict(rows=64, rows_per_microbatch=True),
        "[train] rows_per_microbatch must be a positive integer, got True",
    ),
    (dict(rows=0, rows_per_microbatch=1), "[train] rows must be a positive integer, got 0"),
    (
        dict(rows=64, rows_per_microbatch=2, data_parallel=None),
        "[train] data_parallel must be a positive integer",
    ),
    (
        dict(rows=64, rows_per_microbatch=3, num_microbatches=5, data_parallel=4),
        "[train] 64 rows ≠ dp 4 × 3 rows × 5 microbatches = 60; drop one of the three; use rows=60",
    ),
    (
        dict(purpose="logprob_ref", rows=64),
        "[logprob_ref] needs rows_per_microbatch or num_microbatches, or max_tokens",
    ),
    (dict(rows_per_microbatch=2), "[train] needs rows"),
    (
        dict(rows=64, rows_per_microbatch=4, max_tokens_per_microbatch=16384),
        "[train] rows_per_microbatch=4 and max_tokens_per_microbatch=16384 are exclusive",
    ),
    (
        dict(rows=64, max_tokens_per_microbatch=16384),
        "[train] max_tokens_per_microbatch=16384 needs sequence_length",
    ),
    (
        dict(rows=64, max_tokens_per_microbatch=4096, sequence_length=5000, widths=(2048, 5120)),
        "[train] max_tokens_per_microbatch 4096 < sequence_length 5000 padded to 5120; "
        "use max_tokens_per_microbatch=5120",
    ),
    (
        dict(rows=64, max_tokens_per_microbatch=4096, num_microbatches=4, sequence_length=64),
        "num_microbatches=4 and max_tokens_per_microbatch=4096 are exclusive",
    ),
    (
        dict(rows=64, max_tokens_per_microbatch=4096, sequence_length=100, widths=(64, 96)),
        "widths=[64, 96] must increase and end at sequence_length=100 or more; use [64, 96, 100]",
    ),
    (
        dict(rows=64, max_tokens_per_microbatch=4096, sequence_length=100, widths=(64, 32, 128)),
        "widths=[64, 32, 128] must increase and end at sequence_length=100 or more; use [32, 64, 100]",
    ),
    (dict(rows=64, rows_per_microbatch=4, packing=True), "packing belongs to a token budget; use max_tokens"),
    (
        dict(rows=100, rows_per_microbatch=4, data_parallel=8),
        "[train] 100 rows per update is not a multiple of dp 8 × 4 = 32 (3×32 + 4); "
        'use 96 or 128, or remainder="pad"',
    ),
    (
        dict(rows=64, rows_per_microbatch=80, data_parallel=8),
        "[train] one microbatch is dp 8 × 80 = 640 rows but the update has 64; "
        "use rows=640, or rows_per_microbatch=8",
    ),
    (
        dict(purpose="eval", rows=6, rows_per_microbatch=1, data_parallel=8),
        '[eval] one microbatch is dp 8 × 1 = 8 rows but the batch has 6; use rows=8, or remainder="pad"',
    ),
    (
        dict(rows=48, num_microbatches=6, multiple_of=4),
        "[train] 6 microbatches is not a multiple of multiple_of 4; use 4 or 8",
    ),
    (dict(purpose="evel", rows=4, rows_per_microbatch=1), 'did you mean "eval"?'),
    (dict(rows=4, rows_per_microbatch=1, remainder="trim"), "must be one of error, pad, drop"),
]


@pytest.mark.parametrize(("kwargs", "message"), REFUSED)
def test_refusals_name_the_values_the_arithmetic_and_the_way_out(kwargs, message):
    assert message in str(refusal(BatchPlan, **kwargs))


def test_a_plan_is_checked_where_it_is_used():
    plan = BatchPlan("logprob_ref", rows=256, rows_per_microbatch=16)
    plan.require("logprob_old", "logprob_ref")
    assert str(refusal(plan.require, "train")) == (
        'forward_backward got plan "logprob_ref" (16 rows per microbatch); pass plans["train"]'
    )
    padded = BatchPlan(rows=100, rows_per_microbatch=4, data_parallel=8, remainder="pad")
    assert (padded.check_rows(100), padded.check_rows(128), plan.check_rows(256)) == (28, 0, 0)
    assert 'plan "logprob_ref" covers 256 rows, batch has 240' in str(refusal(plan.check_rows, 240))
    plan.check_keys(["tokens", "loss_mask", "rewards", "row_ids"])
    for name in ("micro_batch_size", "ppo_mini_batch_size", "num_microbatches", "rows_per_microbatch"):
        assert f'batch["{name}"] is a size' in str(refusal(plan.check_keys, ["tokens", name]))


def test_plans_are_values():
    by_rows = BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
    by_count = BatchPlan(rows=64, num_microbatches=8, data_parallel=4)
    assert by_rows == by_count and hash(by_rows) == hash(by_count)
    assert by_rows.fingerprint() == by_count.fingerprint() == "a1de6e1fbd16984c"
    assert by_rows.replace(rows=128).num_microbatches == 16
    assert by_rows.replace(num_microbatches=4).rows_per_microbatch == 4
    assert by_rows.replace(data_parallel=8).fingerprint() != by_rows.fingerprint()
    assert by_rows.rows_per_global_microbatch == 8
    assert by_rows.summary() == "64 rows on 4 replicas: 8 microbatches of 2 rows each"
    padded = BatchPlan(rows=7, rows_per_microbatch=4, remainder="pad")
    assert padded.summary() == "7 rows on 1 replica: 2 microbatches of 4 rows each, padded by 1"
    assert BatchPlan(rows=4, rows_per_microbatch=4).summary() == "4 rows on 1 replica: 1 microbatch of 4 rows"
    assert (
        BatchPlan(rows=2, rows_per_microbatch=1).summary()
        == "2 rows on 1 replica: 2 microbatches of 1 row each"
    )
    with pytest.raises(AttributeError):
        by_rows.rows = 128


def test_replicas_follow_from_devices():
    assert data_parallel_size(16, tensor=2, pipe=2) == 4
    error = refusal(data_parallel_size, 16, tensor=3, pipe=2)
    assert str(error).startswith("16 devices cannot form tp 3 × pp 2 × cp 1 = 6; dp would be 2.67")
    assert all(data_parallel_size(**choice, tensor=3, pipe=2) for choice in error.choices)


def megatron_rows(inputs):
    """The ramp-up that Megatron's three forms describe."""
    if "step_batch_size_schedule" in inputs:
        return RampUp.parse(inputs["step_batch_size_schedule"], inputs["seq_length"])
    if inputs["rampup_batch_size"] is None:
        return RampUp(((0, inputs["global_batch_size"]),))
    return RampUp.linear(*inputs["rampup_batch_size"], inputs["global_batch_size"])


def megatron_values(inputs, ramp_up, consumed):
    """One record of the reference: unchecked ones may leave a remainder, which a plan would refuse."""
    rows = ramp_up.rows_at(consumed or 0)
    sizes = {"rows_per_microbatch": inputs["micro_batch_size"], "data_parallel": inputs["data_parallel_size"]}
    drop = inputs["decrease_batch_size_if_needed"]
    unchecked = drop or not inputs["consistency_check"]
    plan = BatchPlan(rows=rows, remainder="drop" if unchecked else "error", **sizes)
    return {
        "consumed_samples": consumed,
        "num_microbatches": plan.num_microbatches,
        "global_batch_size": rows,
        "running_global_batch_size": plan.real_rows if drop else rows,
    }


def test_megatron_microbatch_calculator(golden):
    cases = golden("megatron_microbatch_calculator.json")["cases"]
    assert len(cases) == 25
    for case in cases:
        inputs, expected = case["inputs"], case["expected"]
        positions = [None, *inputs["consumed_samples"]]
        if "error" not in expected:
            ramp_up = megatron_rows(inputs)
            records = [megatron_values(inputs, ramp_up, position) for position in positions]
            assert records == [expected["initial"], *expected["after_update"]], case["name"]
        elif expected["when"] == "init":
            with pytest.raises((PlanError, TypeError)):
                megatron_values(inputs, megatron_rows(inputs), None)
        else:
            ramp_up, before = megatron_rows(inputs), expected["values_before"]
            assert [megatron_values(inputs, ramp_up, r["consumed_samples"]) for r in before] == before
            refusal(megatron_values, inputs, ramp_up, expected["at_consumed_samples"])


def test_ramp_up_forms_and_refusals():
    assert RampUp.parse("0:16 1.5K:32 250B:64").steps == ((0, 16), (1500, 32), (250 * 10**9, 64))
    assert RampUp.parse("0:16 1M:32", sequence_length=1000) == RampUp([(0, 16), (1000, 32)])
    assert as_ramp_up([(0, 16), [1500, 32]]) == as_ramp_up("0:16 1500:32") == RampUp([(0, 16), (1500, 32)])
    assert RampUp.linear(8, 8, 64, 24).row_counts == (8, 16, 24)
    error = refusal(RampUp.linear, 8, 8, 1, 24)
    assert "2 increments from start=8 to rows=24 need samples of at least 2, got 1" in str(error)
    assert RampUp.linear(8, 8, *error.choices[0].values(), 24).steps == ((0, 8), (1, 16), (2, 24))
    error = refusal(RampUp.linear, 8, 5, 64, 24)
    assert "growth from 8 to 24 rows = 16 is not a multiple of increment 5; use 4 or 8" in str(error)
    for steps in (((0, 16), (0, 32)), ((0, True),), ((0, 8), (1.5, 16)), (0, 8), ((0, 8, 16),)):
        refusal(RampUp, steps)


def naive_windows(length_rows, dataset_rows, rows_at, remainder):
    """Plain loop: (start, real rows) of each update."""
    position, windows = 0, []
    while position < length_rows:
        end = length_rows
        if dataset_rows:
            end = min(end, (position // dataset_rows + 1) * dataset_rows)
        rows = rows_at(position)
        if position + rows <= end or remainder == "pad":
            windows.append((position, min(rows, end - position)))
        position = min(position + rows, end)
    return windows


@given(
    samples=st.integers(1, 400),
    dataset_rows=st.none() | st.integers(16, 200),
    thresholds=st.lists(st.integers(1, 300), max_size=3, unique=True),
    counts=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    remainder=st.sampled_from(["pad", "drop"]),
)
@settings(max_examples=300, deadline=None)
def test_windows_are_those_of_a_plain_loop(samples, dataset_rows, thresholds, counts, remainder):
    starts = [0, *sorted(thresholds)]
    ramp_up = RampUp([(start, 4 * count) for start, count in zip(starts, counts, strict=False)])
    plan = BatchPlan(rows=ramp_up.steps[-1][1], rows_per_microbatch=1, data_parallel=4)
    stream = dict(dataset_rows=dataset_rows, ramp_up=ramp_up, remainder=remainder)
    wanted = naive_windows(samples, dataset_rows, ramp_up.rows_at, remainder)
    if not wanted:
        assert 'use remainder="pad"' in str(refusal(RunPlan, plan, samples=samples, **stream))
        return
    run = RunPlan(plan, samples=samples, **stream)
    assert [(window.start, window.rows) for window in run.windows()] == wanted
    assert run.total_updates == len(wanted)
    assert [window.plan.rows for window in run.windows()] == [ramp_up.rows_at(start) for start, _ in wanted]
    assert set(run.row_counts) == {window.plan.rows for window in run.windows()}
    first = run.total_updates // 2
    assert list(run.windows(first)) == list(run.windows())[first:]
    by_updates = RunPlan(plan, updates=run.total_updates, **stream)
    assert [window.start for window in by_updates.windows()] == [start for start, _ in wanted]


def test_length_in_each_unit():
    plan = BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
    epochs = RunPlan({"train": plan}, epochs=3, dataset_rows=1001)
    assert (epochs.total_updates, epochs.window(15).rows, epochs.window(16).rows) == (48, 41, 64)
    assert epochs.window(16)[:4] == (16, 1, 1001, 64)
    assert RunPlan(plan, epochs=3, dataset_rows=1001, remainder="drop").total_updates == 45
    assert RunPlan(plan, epochs=0.5, dataset_rows=1001).total_updates == 8
    assert RunPlan(plan, epochs=0.5, dataset_rows=1001).window(7).end == 501
    assert RunPlan(plan, updates=7).total_updates == 7
    assert RunPlan(plan, samples=1000).total_updates == 16
    assert RunPlan(plan, tokens=64 * 128 * 5 + 1, sequence_length=128).total_updates == 6
    assert RunPlan(plan, samples=10**12).total_updates == 10**12 // 64
    refusal(epochs.window, 48)


def test_epochs_are_limited_only_where_each_ends_with_a_short_update(monkeypatch):
    """Those of whole updates need no entry of the plan each."""
    monkeypatch.setattr(run_plans, "_MOST_EPOCHS", 100)
    plan = BatchPlan(rows=4, rows_per_microbatch=1)
    assert RunPlan(plan, epochs=10**6, dataset_rows=8).total_updates == 2 * 10**6
    # as many rows as there may be
    assert RunPlan(plan, epochs=2**30, dataset_rows=2**32).total_updates == 2**60
    assert refusal(RunPlan, plan, epochs=2**30 + 1, dataset_rows=2**32).choices[0]["epochs"] == 2**30
    for length in (dict(epochs=101), dict(updates=3 * 101)):
        (choice,) = refusal(RunPlan, plan, dataset_rows=9, **length).choices
        assert RunPlan(plan, dataset_rows=9, **choice).total_updates == 3 * 100


def test_a_rounded_down_update_consumes_what_it_uses():
    plan = BatchPlan(rows=27, rows_per_microbatch=2, data_parallel=4, remainder="drop")
    run = RunPlan(plan, samples=240)
    assert (run.total_updates, run.window(1).start) == (10, 24)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "give exactly one of updates, samples, tokens or epochs, got none"),
        (dict(updates=3, samples=64), "got updates=3 and samples=64"),
        (dict(updates=True), "[run] updates must be a positive integer, got True"),
        (dict(epochs=True, dataset_rows=64), "epochs must be a positive number, got True"),
        (dict(epochs=float("nan"), dataset_rows=64), "epochs must be a positive number"),
        (dict(epochs=1e300, dataset_rows=64), "epochs must be a positive number below 2**62, got 1e+300"),
        (dict(epochs=1), "epochs=1 needs dataset_rows"),
        (dict(tokens=1000), "tokens=1000 needs sequence_length"),
        (dict(tokens=1000, sequence_length=300, remainder="error"), "use 19200, or remainder"),
        (
            dict(epochs=1, dataset_rows=1001, remainder="error"),
            'dataset_rows=1001 does not divide into updates of 64 rows (41 left over); use remainder="pad" or "drop"',
        ),
        (
            dict(samples=100, remainder="error"),
            "samples=100 does not divide into updates of 64 rows (36 left over)",
        ),
        (dict(updates=5, dataset_rows=50, remainder="drop"), "is less than one update of 64 rows"),
        (dict(samples=50, remainder="drop"), "50 rows are fewer than one update of 64"),
        (dict(samples=50, remainder="error"), '(50 left over); use remainder="pad"'),
        (dict(updates=5, ramp_up="0:30 100:64"), "the step 0:30 is not a legal plan"),
        (dict(updates=5, ramp_up="0:32"), "ramp_up ends at 32 rows but the train plan has 64"),
    ],
)
def test_run_refusals_and_their_choices(kwargs, message):
    plan = BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
    error = refusal(RunPlan, plan, **kwargs)
    assert message in str(error)
    for choice in error.choices:
        assert RunPlan(plan, **{**kwargs, **choice}).total_updates


def test_a_run_needs_each_plan_under_its_own_purpose():
    train = BatchPlan(rows=8, rows_per_microbatch=2)
    evaluate = BatchPlan("eval", rows=8, rows_per_microbatch=8)
    assert RunPlan({"train": train, "eval": evaluate}, updates=1).plans["eval"] == evaluate
    assert 'pass plans["train"]' in str(refusal(RunPlan, {"train": evaluate}, updates=1))
    assert 'needs a plan for "train"' in str(refusal(RunPlan, {"eval": evaluate}, updates=1))


@given(st.integers(1, 500), st.sampled_from([(1, 1), (2, 4), (8, 2), (16, 1)]))
@settings(max_examples=50, deadline=None)
def test_total_updates_do_not_depend_on_the_cut(samples, cut):
    data_parallel, rows_per_microbatch = cut
    plan = BatchPlan(rows=16, data_parallel=data_parallel, rows_per_microbatch=rows_per_microbatch)
    assert RunPlan(plan, samples=samples, dataset_rows=100).total_updates == (
        RunPlan(BatchPlan(rows=16, num_microbatches=1), samples=samples, dataset_rows=100).total_updates
    )


def test_horizon_warning_has_both_numbers():
    warning = horizon_warning(200, 325)
    assert warning.startswith("schedule ends at 200, run makes 325 updates: lr is 0 for the last 125")
    assert "400" in horizon_warning(400, 325) and "325" in horizon_warning(400, 325)
    assert horizon_warning(325, 325) is None


def test_resume_may_change_the_cut_but_not_the_rows():
    plan = BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
    saved = json.loads(json.dumps({**plan.to_dict(), "seed": 1, "order": ("shuffled", 3)}))
    order = {"seed": 1, "order": ("shuffled", 3)}
    assert explain_difference(saved, plan.replace(data_parallel=8, rows_per_microbatch=1), **order) is None
    assert "rows 64 vs 128" in explain_difference(saved, plan.replace(rows=128), **order)
    assert "seed 1 vs 2" in explain_difference(saved, plan, **{**order, "seed": 2})
    rounded_down = plan.replace(rows=65, remainder="drop")
    assert explain_difference(saved, rounded_down, **order) is None
    assert "rows 64 vs 60" in explain_difference(saved, rounded_down.replace(rows_per_microbatch=5), **order)


def test_a_longer_run_goes_on_only_where_no_window_of_the_saved_one_was_short():
    plan = BatchPlan(rows=4, rows_per_microbatch=2)
    longer = RunPlan(plan, samples=40)
    for samples, update, consumed in ((18, 4, 16), (18, 5, 18), (20, 5, 20)):
        saved = RunPlan(plan, samples=samples).window(update - 1)
        assert saved.start + saved.rows == consumed
        shift = explain_shift(longer, update, consumed)
        assert (shift is None) == (saved.rows == 4)
    assert "consumed 18 rows in 5 updates, by this config they would be 20" in explain_shift(longer, 5, 18)
    assert explain_shift(longer, 0, 0) is explain_shift(longer, 10, 40) is None


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_a_run_goes_on_from_every_update_of_its_own_plan(remainder):
    """One that drops the rest of each epoch was refused at the end of an epoch, since the next row is another one."""
    plan = BatchPlan(rows=4, rows_per_microbatch=2)
    run = RunPlan(plan, epochs=3, dataset_rows=10, remainder=remainder)
    ends = [window.start + window.rows for window in run.windows()]
    assert ends[1] == 8 and run.window(2).start == (8 if remainder == "pad" else 10)
    assert [explain_shift(run, update, end) for update, end in enumerate(ends, 1)] == [None] * len(ends)


def test_hosts_with_different_plans_are_refused():
    plan = BatchPlan(rows=56, rows_per_microbatch=1, data_parallel=8)
    other = plan.replace(rows=64)
    check_same_on_all_hosts([plan.to_dict()] * 4)
    error = refusal(check_same_on_all_hosts, [plan.to_dict()] * 3 + [other.to_dict()])
    assert re.match(r"host 3 plan fingerprint \w+ ≠ host 0 \w+: ", str(error))
    assert "num_microbatches 8 vs 7" in str(error)


def test_the_arithmetic_needs_no_jax():
    files = Path(jaxfb.batch_plan.__file__).parent.glob("*.py")
    text = "\n".join(file.read_text() for file in files)
    assert re.findall(r"^\s*(?:from|import) (json|math)\b", text, re.MULTILINE)
    assert not re.findall(r"^\s*(?:from|import) (jax|numpy)\b", text, re.MULTILINE)
