"""Plans of post-training: the update's memory as the run's own state has it, and what is beside it."""

import json

import jax
import jax.numpy as jnp
import pytest
import yaml
from marks import some_slow

from jaxfb.cli.commands import main
from jaxfb.config import config_to_dict, load_config
from jaxfb.models.generate import cache_of
from jaxfb.planner import parse_topology
from jaxfb.planner.verdict import estimated, plan
from jaxfb.rl.policy import make_policy_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training.from_config.sizes import config_with_model

ONE = parse_topology("cpu:1")
SMALL = {
    "sft": ["mesh.data=1", "conversations.path=examples/data/conversations.jsonl"],
    "grpo_arithmetic": ["mesh.data=1", "task.digits=1", "task.held_out=8", "warm_start.updates=0"],
    "ppo_arithmetic": ["mesh.data=1", "task.digits=1", "task.held_out=8", "warm_start.updates=0"],
}
LORA = ["lora.rank=4", "precision.frozen_dtype=bfloat16"]


def size(tree):
    return sum(
        leaf.nbytes if hasattr(leaf, "nbytes") else leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@pytest.mark.parametrize("name", some_slow(SMALL, fast=("sft", "grpo_arithmetic")))
@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_the_state_is_counted_to_the_byte(name, lora):
    config = load_config(name, [*SMALL[name], *lora])
    make = make_supervised_work if name == "sft" else make_policy_work
    work, verdict = make(config), estimated(config, ONE)
    state = work.abstract_state()
    assert verdict.estimate.parameters == size(state["params"])
    assert verdict.estimate.optimizer == size(state["opt_state"])
    assert set(verdict.kept) == {"reference", "critic"} & set(state)
    if "reference" in state:
        assert verdict.kept["reference"] == size(state["reference"])
    if "critic" in state:  # but for the head of a number a token
        critic = size(state["critic"]["params"]) + size(state["critic"]["opt_state"])
        assert verdict.kept["critic"] == pytest.approx(critic, rel=0.01)
    if lora:
        assert verdict.estimate.optimizer < 0.3 * verdict.estimate.parameters
        assert verdict.estimate.gradients == pytest.approx(verdict.estimate.optimizer / 2, rel=0.01)


def test_other_phases_count_where_they_need_more_than_the_update():
    wide = ["rollout.prompts=4096", "rollout.rows_per_update=8", "plans.train.rows_per_microbatch=8"]
    few, many = (
        estimated(load_config("grpo_arithmetic", [*SMALL["grpo_arithmetic"], *more]), ONE)
        for more in (wide[1:], wide)
    )
    assert many.phases["sampling"] > many.estimate.temporaries
    others = max(many.phases.values())
    assert many.needed == many.estimate.arguments + others + many.kept["reference"]
    assert few.needed < many.needed


def test_keys_and_values_are_those_that_sampling_makes():
    work = make_policy_work(load_config("grpo_arithmetic", SMALL["grpo_arithmetic"]))
    sizes = work.base.sizes
    kept = size(cache_of(sizes, 4, 9, jnp.dtype("float32")))
    assert kept == 4 * 2 * sizes.num_layers * 4 * 9 * sizes.num_kv_heads * sizes.head_size


def test_a_plan_of_post_training_is_printed_with_its_own_rows(capsys):
    command = ["plan", "ppo_arithmetic", "--topology", "gpu:h100x2", "--no-compile"]
    assert main(command) == 0
    page = capsys.readouterr().out
    for row in (
        "FITS",
        "reference, beside it",
        "critic, beside it",
        "sampling, with its weights",
        "critic's update",
    ):
        assert row in page
    assert main([*command, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert {*verdict["kept"]} == {"reference", "critic"} and verdict["phases"]["sampling"] > 0
    assert verdict["needed"] >= verdict["estimate"]["parameters"] + verdict["kept"]["critic"]


REFUSED = [
    ("grpo_arithmetic", ["plans.logprob_ref=null"], r"\[logprob_ref\] needs plans.logprob_ref with"),
    ("grpo_arithmetic", ["rollout.samples_per_prompt=1"], "samples_per_prompt ≥ 2"),
    (
        "grpo_arithmetic",
        ["plans.train.rows_per_microbatch=100"],
        "; use plans.train.rows_per_microbatch=64 or 128$",
    ),
    (
        "ppo_arithmetic",
        ["plans.critic.rows_per_microbatch=100"],
        r"^\[critic\] .*; use plans.critic.rows_per",
    ),
    ("sft", ["plans.eval=null"], r"\[eval\] needs plans.eval with"),
    ("sft", ["plans.train.max_tokens_per_microbatch=48"], "; use plans.train.max_tokens_per_microbatch=96$"),
    ("sft", ["mesh.context=2", "conversations.sequence_length=98"], "conversations.sequence_length=100$"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_what_the_command_refuses_is_not_planned(name, changes, message):
    topology = parse_topology("cpu:2") if "mesh.context=2" in changes else ONE
    with pytest.raises(ValueError, match=message):
        estimated(load_config(name, [*SMALL[name], *changes]), topology)


def test_rows_that_no_microbatch_divides_are_sized_by_full_ones():
    """A budget of 8 rows, of which a run fills up the last microbatch; 124 rows on 4 replicas are 31 each."""
    topology = parse_topology("v5e:2x2")
    asked = ["mesh.data=4", *SMALL["sft"][1:]]
    even, odd, few = (
        estimated(load_config("sft", [*asked, f"batch.rows={n}"]), topology) for n in (128, 124, 30)
    )
    assert odd.estimate.temporaries == even.estimate.temporaries
    assert few.estimate.temporaries <= even.estimate.temporaries


def test_a_run_may_start_from_one_that_started_from_another(tmp_path):
    """As after `jaxfb import-hf`, sft and dpo: the config of the second run has no model of its own."""
    first = load_config("sft", SMALL["sft"])
    second = load_config("dpo", [f"start.run={tmp_path / 'first'}"])
    for name, config in (("first", first), ("second", second)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    runs = (tmp_path / "first", tmp_path / "second")
    third = [load_config("dpo", [f"start.run={run}", "start.tokenizer=bytes", "mesh.data=1"]) for run in runs]
    one, other = (estimated(config, ONE) for config in third)
    assert one.needed == other.needed
    found = [config_with_model(config).model for config in third]
    assert found == [first.model] * 2  # as jaxfb export-hf reads it, too


def test_layouts_of_post_training_are_not_searched(capsys):
    assert main(["plan", "sft", "--topology", "gpu:h100x2", "--search", "--no-compile"]) == 2
    assert "--search tries layouts of `jaxfb train` alone" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compiler_is_asked_for_the_update_of_fine_tuning():
    small = ["model.num_layers=1", "model.hidden_size=32", "conversations.sequence_length=64"]
    small += ["plans.eval.rows_per_microbatch=1"]
    verdict = plan(load_config("sft", [*SMALL["sft"], *small, *LORA]), ONE)
    assert verdict.compiled.arguments == pytest.approx(verdict.estimate.arguments, rel=0.02)
    assert verdict.needed == verdict.compiled.total


def test_each_width_of_rows_is_sized_on_its_own_context_devices(capsys):
    """On one device of four a budget of 256 tokens holds a row of 64, and of 128 on two; the longest take all four."""
    asked = ["mesh.data=2", "mesh.context=4", "conversations.sequence_length=256", *SMALL["sft"][1:]]
    asked += ["plans.train.rows_per_microbatch=null", "plans.train.max_tokens_per_microbatch=256"]
    asked += ["plans.train.widths=[64,128,256]", "plans.train.context_by_width=true", "batch.rows=16"]
    verdict = estimated(load_config("sft", asked), parse_topology("v5e:2x4"))
    names = [
        f"rows of up to {w} tokens on {c} of 4 context devices" for w, c in ((64, 1), (128, 2), (256, 4))
    ]
    assert [*verdict.widths] == names and all(name in verdict.phases for name in names)
    slow, fast = verdict.widths[names[2]], verdict.widths[names[0]]
    assert verdict.tokens_per_second == pytest.approx(slow) and fast > slow
    assert verdict.needed >= verdict.estimate.arguments + max(verdict.phases.values())
    assert main(["plan", "sft", *asked, "--topology", "v5e:2x4", "--no-compile"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n    {name}" in page and f"  {name}: " in page for name in names)
