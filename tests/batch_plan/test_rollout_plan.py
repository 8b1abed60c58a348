"""Prompts, samples, rows and updates: counted once, refused before anything runs; token budgets are strict."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfb.batch_plan import (
    BatchPlan,
    PlanError,
    RolloutPlan,
    RunPlan,
    arrange,
    check_whole_groups,
    explain_difference,
    karmarkar_karp,
)
from jaxfb.batch_plan.budget import context_sizes


def plans(update=256, rollout=640, dp=8, **changes):
    made = {
        "train": BatchPlan(rows=update, rows_per_microbatch=4, data_parallel=dp),
        "logprob_ref": BatchPlan("logprob_ref", rows=rollout, num_microbatches=4, data_parallel=dp),
    }
    return made | changes


def rollout_plan(**changes):
    sizes = dict(prompts=128, samples_per_prompt=5, rows_per_update=128)
    given = {**sizes, **changes}
    rows = given["prompts"] * given["samples_per_prompt"]
    made = given.pop("plans", None) or plans(given["rows_per_update"], rows)
    return RolloutPlan(made, **given)


def test_the_numbers_of_a_run_that_a_verl_user_knows():
    """(P, n, mini-batch in prompts) = (1024, 5, 256) on 8 replicas: 4 updates of 160 rows a replica."""
    train = BatchPlan(rows=256 * 5, rows_per_microbatch=80, data_parallel=8)
    old = BatchPlan("logprob_old", rows=1024 * 5, rows_per_microbatch=160, data_parallel=8)
    plan = RolloutPlan(
        {"train": train, "logprob_old": old}, prompts=1024, samples_per_prompt=5, rows_per_update=1280
    )
    assert (plan.rows, plan.updates_per_pass, plan.total_updates) == (5120, 4, 4)
    assert (train.num_microbatches, old.num_microbatches) == (2, 4)
    table = dict(plan.table())
    assert "1280 rows = 256 prompts" in table["rows_per_update (G)"]
    assert "ppo_mini_batch_size, which counts prompts" in table["rows_per_update (G)"]
    assert "2 microbatches of 80 rows each" in table["[train]"]
    assert json.loads(json.dumps(plan.to_dict()))["plans"]["train"]["rows"] == 1280


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(epochs=True), "[rollout] epochs must be a positive integer, got True"),
        (
            dict(rows_per_update=96),
            "rollout gives 128 prompts × 5 = 640 rows; updates of 96 leave 64 rows; "
            "use rows_per_update=80 or 128",
        ),
        (
            dict(rows_per_update=1280),
            "update of 1280 rows needs more than the 640 a rollout yields; use rows_per_update=640",
        ),
        (
            dict(samples_per_prompt=1, groups="grpo"),
            "grpo needs samples_per_prompt ≥ 2, got 1",
        ),
        (
            dict(samples_per_prompt=8, whole_groups=True, rows_per_update=256, prompts=64),
            "[train] whole_groups keeps groups of 8 samples together, but microbatches of 4 rows cut them; "
            "use rows_per_microbatch=8",
        ),
        (
            dict(whole_groups=True, seed=None),
            "[rollout] whole_groups keeps groups of 5 samples together, but updates of 128 rows cut them; "
            "use rows_per_update=80 or 160",
        ),
        (
            dict(whole_groups=True, rows_per_update=96, seed=None),
            "updates of 96 leave 64 rows; use rows_per_update=80 or 160",
        ),
        (
            dict(
                plans={"train": BatchPlan(rows=129, rows_per_microbatch=4, data_parallel=2, remainder="drop")}
            ),
            "[train] covers 129 rows, an update has 128; use rows=128",
        ),
        (dict(plans=plans(256)), "[train] covers 256 rows, an update has 128; use rows=128"),
        (dict(plans=plans(128, 320)), "[logprob_ref] covers 320 rows, a rollout has 640; use rows=640"),
        (
            dict(plans=plans(128, value=BatchPlan("value", rows=640, rows_per_microbatch=4))),
            "plans of one mesh must have the same data_parallel",
        ),
        (
            dict(plans={"train": BatchPlan("logprob_ref", rows=128, num_microbatches=1)}),
            'got plan "logprob_ref"',
        ),
    ],
)
def test_impossible_rollouts_are_refused_with_the_way_out(changes, message):
    with pytest.raises(PlanError) as caught:
        rollout_plan(**changes)
    assert message in str(caught.value)
    for choice in caught.value.choices:
        rows = {"rows_per_update": 128, **changes, **choice}
        if rows["rows_per_update"] % 32 == 0:
            rollout_plan(**rows)


def test_a_purpose_without_a_plan_is_refused():
    with pytest.raises(PlanError, match=r"\[value\] has no plan.*nothing is inherited"):
        rollout_plan().plan("value")


def test_rows_that_are_not_whole_groups_are_refused():
    check_whole_groups([3, 3, 1, 1], 2)
    with pytest.raises(PlanError, match="prompt 17 has 3 of 4 samples"):
        check_whole_groups([5] * 4 + [17] * 3, 4)


def test_each_pass_is_all_rows_once_in_an_order_that_no_cut_changes():
    one = rollout_plan(epochs=2, rollouts=3)
    other = rollout_plan(epochs=2, rollouts=3, plans=plans(128, 640, dp=2))
    updates = [one.update(u) for u in range(one.total_updates)]
    assert updates == [other.update(u) for u in range(other.total_updates)]
    passes = {(u.rollout, u.epoch): [] for u in updates}
    for update in updates:
        passes[update.rollout, update.epoch] += update.rows
    assert len(passes) == 6 and all(sorted(rows) == list(range(640)) for rows in passes.values())
    assert len({tuple(rows) for rows in passes.values()}) == 6
    assert [row for u in range(5) for row in rollout_plan(seed=None).update(u).rows] == list(range(640))
    with pytest.raises(PlanError, match="no update 30: there are 30"):
        one.update(30)


budgets = st.builds(
    dict,
    rows=st.integers(1, 40),
    data_parallel=st.integers(1, 4),
    sequence_length=st.integers(4, 50),
    multiple_of=st.integers(1, 3),
    packing=st.booleans(),
)


@given(budgets, st.integers(1, 5), st.data())
@settings(max_examples=300, deadline=None)
def test_a_token_budget_is_strict_and_loses_no_row(sizes, factor, data):
    plan = BatchPlan(max_tokens_per_microbatch=sizes["sequence_length"] * factor, **sizes)
    longest = sizes["sequence_length"]
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=plan.rows, max_size=plan.rows))
    made = arrange(plan, lengths)
    cut = made.plan
    assert (made.width, cut.rows_per_microbatch, cut.num_microbatches) in plan.shapes()
    assert cut.purpose == plan.purpose and cut.data_parallel == plan.data_parallel
    assert cut.rows_per_microbatch * made.width <= plan.max_tokens_per_microbatch
    assert cut.num_microbatches % plan.multiple_of == 0
    assert sorted(row for bin_ in made.bins for row in bin_) == list(range(plan.rows))
    assert all(sum(lengths[row] for row in bin_) <= made.width for bin_ in made.bins)
    assert made == arrange(plan, lengths)
    if not plan.packing:
        assert made.bins[: plan.rows] == tuple((row,) for row in range(plan.rows))


def test_rows_that_fit_together_exactly_leave_no_token_blank():
    """6 + 2 and 5 + 3, longest first."""
    plan = BatchPlan(rows=4, max_tokens_per_microbatch=8, sequence_length=8, widths=(8,), packing=True)
    lengths = [3, 5, 2, 6]
    made = arrange(plan, lengths)
    assert made.plan.num_microbatches == 2
    assert [sum(lengths[row] for row in bin_) for bin_ in made.bins] == [8, 8]


def test_rows_that_fit_into_one_are_spread_over_the_replicas():
    plan = BatchPlan(
        rows=4, max_tokens_per_microbatch=12, sequence_length=12, widths=(12,), packing=True, data_parallel=2
    )
    lengths = [5, 3, 3, 1]
    assert [sum(lengths[row] for row in bin_) for bin_ in arrange(plan, lengths).bins] == [6, 6]


def test_a_row_is_cut_over_context_devices_whose_share_of_the_budget_holds_it_in_two_pieces_each():
    plan = BatchPlan(
        rows=8, max_tokens_per_microbatch=64, sequence_length=64, max_context=4, widths=(8, 12, 16, 32, 64)
    )  # one context device has 16 tokens of the budget
    sizes = {8: (1, 2, 4), 12: (1, 2), 16: (1, 2, 4), 32: (2, 4), 64: (4,)}
    assert {width: context_sizes(plan, width) for width in plan.widths} == sizes


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=24), st.integers(1, 6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_shares_are_balanced(costs, parts, equal):
    costs = costs[: len(costs) // parts * parts] if equal else costs
    shares = karmarkar_karp(costs, parts, equal_counts=equal)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    sums = [sum(costs[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(costs, default=0)
    if equal:
        assert {len(share) for share in shares} == {len(costs) // parts}


def test_balance_of_the_textbook():
    assert sorted(map(len, karmarkar_karp([8, 7, 6, 5, 4], 2))) == [2, 3]
    sums = [sum([8, 7, 6, 5, 4][i] for i in share) for share in karmarkar_karp([8, 7, 6, 5, 4], 2)]
    assert sorted(sums) == [14, 16]


def test_replicas_of_a_microbatch_get_equal_work():
    plan = BatchPlan(rows=64, data_parallel=4, max_tokens_per_microbatch=64, sequence_length=64, packing=True)
    lengths = [1 + (7 * row) % 64 for row in range(64)]
    made = arrange(plan, lengths)
    cut = made.plan
    for m in range(cut.num_microbatches - 1):
        loads = [
            sum(lengths[row] for line in cut.rows_of(m, d) for row in made.bins[line])
            for d in range(cut.data_parallel)
        ]
        assert max(loads) - min(loads) <= 16


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([3, 9], "row 1 has 9 tokens, above sequence_length 8"),
        ([3], 'plan "eval" covers 2 rows, batch has 1'),
    ],
)
def test_rows_that_do_not_fit_a_budget_are_refused(lengths, message):
    plan = BatchPlan("eval", rows=2, max_tokens_per_microbatch=16, sequence_length=8)
    with pytest.raises(PlanError, match=message):
        arrange(plan, lengths)


def test_a_budget_may_change_on_resume():
    by_rows = BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
    by_tokens = BatchPlan(
        rows=64, max_tokens_per_microbatch=512, sequence_length=64, packing=True, data_parallel=2
    )
    assert explain_difference(json.loads(json.dumps(by_rows.to_dict())), by_tokens) is None
    assert explain_difference(json.loads(json.dumps(by_tokens.to_dict())), by_rows) is None
    assert BatchPlan(**json.loads(json.dumps(by_tokens.to_dict()))) == by_tokens
    assert by_tokens.real_rows == 64 and by_tokens.check_rows(64) == 0
    with pytest.raises(PlanError, match="covers 64 rows, batch has 63; add 1 rows of weight 0"):
        by_tokens.check_rows(63)
    for use in (lambda: by_tokens.padded_rows, lambda: by_tokens.rows_of(0, 0)):
        with pytest.raises(PlanError, match="cut by tokens: its microbatches follow from the lengths"):
            use()


def test_the_plans_of_a_run_cannot_be_changed_afterwards():
    one = rollout_plan()
    given = plans(128)
    run = RunPlan(given["train"], updates=3)
    for plan in (one, run):
        with pytest.raises(TypeError):
            plan.plans["train"] = given["logprob_ref"]
    mine = dict(one.plans)
    other = RolloutPlan(mine, prompts=128, samples_per_prompt=5, rows_per_update=128)
    mine.pop("train")
    assert other == one and other.train == one.train and hash(other) == hash(one)


@pytest.mark.parametrize(
    "given, message",
    [
        (None, r"plans must be \{purpose: BatchPlan\} .* got None"),
        ({"train": None}, r'plans\["train"\] must be a BatchPlan, got None; leave it out'),
        (plans(128, value=None), r'plans\["value"\] must be a BatchPlan, got None; leave it out'),
        (plans(128, values=1), "unknown purpose 'values'; did you mean \"value\""),
    ],
)
def test_what_is_no_plan_is_refused(given, message):
    sizes = dict(prompts=128, samples_per_prompt=5, rows_per_update=128)
    with pytest.raises(PlanError, match=message):
        RolloutPlan(given, **sizes)
    if isinstance(given, dict):
        with pytest.raises(PlanError):
            RunPlan(given, updates=1)


@pytest.mark.parametrize("purpose", ["logprob_old", "logprob_ref", "value"])
def test_a_pass_that_scores_every_row_drops_none(purpose):
    sizes = dict(rows=12, rows_per_microbatch=5)
    with pytest.raises(PlanError, match='remainder="drop" may give outputs for fewer .* use "pad"') as caught:
        BatchPlan(purpose, **sizes, remainder="drop")
    for choice in caught.value.choices:
        assert BatchPlan(purpose, **{**sizes, **choice}).real_rows == 12
    assert BatchPlan("train", **sizes, remainder="drop").real_rows == 10
    with pytest.raises(PlanError, match="drop") as caught:
        BatchPlan(purpose, rows=12, num_microbatches=3, multiple_of=2, remainder="drop")
    assert caught.value.choices
    for choice in caught.value.choices:
        BatchPlan(purpose, **{**dict(rows=12, num_microbatches=3, multiple_of=2), **choice})


def test_an_update_of_a_rollout_drops_no_row():
    train = BatchPlan(rows=128, rows_per_microbatch=5, data_parallel=8, remainder="drop")
    with pytest.raises(PlanError, match=r'\[train\] remainder="drop" would leave out 8 of the 128 rows'):
        rollout_plan(plans=plans(128, train=train))
