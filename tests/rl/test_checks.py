"""What can be refused is refused before anything is computed, with advice that the same code accepts."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import jax
import numpy as np
import pytest

from jaxfb.batch_plan import PlanError
from jaxfb.config import config_from_dict, config_to_dict
from jaxfb.config.fields import all_keys
from jaxfb.config.policy import PolicyKL, RewardKL
from jaxfb.config.post_training import PlansConfig, RLConfig, SFTConfig
from jaxfb.losses.kl import KL_ESTIMATORS
from jaxfb.mesh import make_mesh
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.rl.advice import changed, planned
from jaxfb.rl.experience import Experience
from jaxfb.rl.policy import make_policy_work, rollout_plan
from jaxfb.rl.resume import refuse_other_rollout
from jaxfb.rl.sampler import Sampler
from jaxfb.rl.start import check_head, make_base
from jaxfb.rl.tasks import Arithmetic, BadJudgement, Problem, Response, checked_correct, checked_reward
from jaxfb.training.persistence.changes import changes_between
from jaxfb.training.reporting.continuing import again, already_finished
from tests.rl.test_policy import PPO, TINY

LENGTH = 8


def with_(*more, **sections):
    values = dict(TINY)
    for changes in (*more, sections):
        for name, change in changes.items():
            values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return config_from_dict(values)


def plan_of(config):
    return planned(make_base(config), lambda base: rollout_plan(base, LENGTH))


# 16 rows a rollout, 8 an update
BAD_PLANS = [
    ({"plans": {"train": {"rows_per_microbatch": 5}}}, r"use plans.train.rows_per_microbatch=4 or 8$"),
    ({"plans": {"train": {"num_microbatches": 3}}}, "use plans.train.num_microbatches=2 or 4$"),
    ({"plans": {"train": {"rows_per_microbatch": 4, "num_microbatches": 3}}}, r"≠ .*; use "),
    ({"plans": {"train": {"rows_per_microbatch": 100}}}, r"one microbatch is .*; use "),
    ({"plans": {"train": {"max_tokens_per_microbatch": 32, "widths": [8, 4]}}},
     r"use plans.train.widths=\[4,8\] with plans.train.max_tokens_per_microbatch=32$"),
    ({"plans": {"train": {"max_tokens_per_microbatch": 4}}}, "use plans.train.max_tokens_per_microbatch=8$"),
    ({"plans": {"train": {"rows_per_microbatch": 4, "packing": True}}},
     r"plans.train.packing needs a token budget; use plans.train.max_tokens_per_microbatch=32 with "
     r"plans.train.rows_per_microbatch=null, or plans.train.packing=false$"),
    ({"plans": {"logprob_old": {"num_microbatches": 2, "widths": [4, 8], "packing": True}}},
     r"\[logprob_old\] plans.logprob_old.widths and plans.logprob_old.packing need a token budget; use "),
    ({"plans": {"logprob_old": None, "logprob_ref": None}}, r"plans.logprob_old and plans.logprob_ref"),
    ({"plans": {"logprob_old": {"rows_per_microbatch": 8, "max_tokens_per_microbatch": 64}}}, "exclusive"),
    ({"rollout": {"rows_per_update": 12}}, "leave 4 rows; use rollout.rows_per_update=8 or 16$"),
    ({"rollout": {"rows_per_update": 32}}, "more than the 16 a rollout yields; use rollout.rows_per_update=16$"),
    ({"rollout": {"rows_per_update": 7}, "mesh": {"data": 4}}, r"not a multiple of dp 4 × 4 = 16; use|; use "),
    ({"rollout": {"prompts": 5, "samples_per_prompt": 3}, "mesh": {"data": 4}}, "; use rollout.prompts="),
    ({"rollout": {"samples_per_prompt": 1, "rows_per_update": 4}}, "samples_per_prompt ≥ 2"),
    ({"rollout": {"samples_per_prompt": 1}}, "≥ 2, got 1; use rollout.samples_per_prompt=2$"),
    (PPO | {"plans": {"critic": {"rows_per_microbatch": 3}}}, r"\[critic\] .*plans.critic.rows_per_microbatch=2 or 4$"),
    (PPO | {"plans": {"critic": None}}, r"\[critic\] needs plans.critic .*; use plans.critic.rows_per_microbatch=8$"),
]  # fmt: skip


@pytest.mark.parametrize(
    "start, message",
    [
        ({"run": "runs/none"}, "there is no run runs/none to start from; .* another start.run"),
        ({"run": "runs/none", "tokenizer": "bytes"}, "there is no run runs/none"),
        ({"run": "."}, "there is no tokenizer tokenizer.json; give start.tokenizer, or a run that has one"),
    ],
)
def test_what_a_run_begins_with_is_named_where_it_is_missing(start, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_base(config_from_dict({**TINY, "model": None, "start": start}))


@pytest.mark.parametrize("changes, message", BAD_PLANS, ids=range(len(BAD_PLANS)))
def test_advice_names_keys_of_the_config_and_is_itself_accepted(changes, message):
    config = with_(*[{name: change} for name, change in changes.items()])
    plans = {**config_to_dict(config)["plans"], **changes.get("plans", {})}
    config = changed(config, {"plans": plans})
    with pytest.raises(PlanError, match=message) as refusal:
        plan_of(config)
    known, sentence = set(all_keys(RLConfig)), str(refusal.value)
    named = set(re.findall(r"\b([a-z_]+\.[a-z_.]+)=", sentence))
    assert named <= known and refusal.value.choices and "remainder" not in sentence
    for choice in refusal.value.choices:
        assert set(choice) <= named
        assert plan_of(changed(config, choice)).train.rows > 0


def test_of_two_wrong_cuts_each_refusal_gives_a_way_out_of_its_own():
    """The sentences ended without any, since no one change makes such a config legal."""
    plans = {"train": {"rows_per_microbatch": 3}, "logprob_old": {"num_microbatches": 99}}
    config = changed(with_(), {"plans": {**config_to_dict(with_())["plans"], **plans}})
    for purpose in plans:
        with pytest.raises(PlanError, match=rf"\[{purpose}\] .*; use plans.{purpose}.") as refusal:
            plan_of(config)
        config = changed(config, refusal.value.choices[0])
    assert plan_of(config).train.rows > 0


DROPS = {"model": {"dropout": 0.1}}
PACKED = {"max_tokens_per_microbatch": 64, "packing": True}


@pytest.mark.parametrize(
    "purpose, sections, off",
    [
        ("train", [DROPS], {"model.dropout": 0.0}),
        ("train", [{"lora": {"dropout": 0.1}}], {"lora.dropout": 0.0}),
        ("train", [DROPS, {"lora": {"dropout": 0.1}}], {"model.dropout": 0.0, "lora.dropout": 0.0}),
        ("critic", [PPO, DROPS, {"lora": {"dropout": 0.1}}], {"model.dropout": 0.0}),  # it has no adapters
    ],
)
def test_dropout_of_packed_rows_is_refused_by_the_keys_that_turn_it_off(purpose, sections, off):
    config = with_(*sections)
    config = changed(config, {"plans": {**config_to_dict(config)["plans"], purpose: PACKED}})
    keys = " and ".join(f"{key}=0" for key in off)
    packing = f"plans.{purpose}.packing"
    words = rf"\[{purpose}\] dropout with {packing}=true .*; use {packing}=false, or {keys}$"
    with pytest.raises(ValueError, match=words) as refusal:
        make_policy_work(config)
    assert refusal.value.choices == ({f"plans.{purpose}.packing": False}, off)
    for choice in refusal.value.choices:
        make_policy_work(changed(config, choice))


@pytest.mark.parametrize(
    "asked, words", [(5, "on 5 problems"), (10**6, "on 90 .*, all there are"), (None, "all")]
)
def test_a_warm_start_prints_how_many_problems_it_learns(monkeypatch, asked, words):
    monkeypatch.setattr("jaxfb.rl.policy.fine_tuned", lambda base, params, pairs, *rest: len(pairs))
    work = make_policy_work(with_({"warm_start": {"updates": 1, "problems": asked}}), Arithmetic(1, "+", 10))
    printed = []
    assert work._warm_start(None, printed.append) == (5 if asked == 5 else 90)
    assert re.search(words, printed[0])


def test_a_run_on_a_task_of_a_program_is_continued_by_that_program():
    directory = SimpleNamespace(is_kept=True, path="runs/own")
    for task, call in (
        (None, "jaxfb rl runs/own --resume"),
        (Own(), "post_train(config, task=task, resume=True)"),
    ):
        work = make_policy_work(with_(), task)
        run = SimpleNamespace(work=work, directory=directory, config=with_(), done=1)
        assert again(run).endswith(call)
        words = already_finished(directory, work.config, 4)
        assert "resume it with a larger rollout.rollouts (--resume, or resume=True in a program)" in words
        assert words.endswith("; to start over, use --fresh (fresh=True)")


def test_the_critic_is_updated_by_its_own_plan(tmp_path):
    values = {"plans": {"critic": {"rows_per_microbatch": 2}}, "run": {"dir": str(tmp_path)}}
    work = make_policy_work(with_(PPO, values), Arithmetic(1, "+", 10))
    critic = work.critic.plan
    assert (critic.purpose, critic.rows, critic.num_microbatches) == ("critic", 8, 4)
    assert work.critic.step.plan is critic and work.step.plan is work.plan.train
    assert work.plan.train.num_microbatches == 2
    assert dict(work.plan.table())["[critic]"].endswith("critic.ppo_micro_batch_size_per_gpu")
    with pytest.raises(PlanError, match=r'Critic got plan "train" .*; pass plans\["critic"\]'):
        type(work.critic)(work.base, work.plan.train)


def test_the_config_and_the_code_know_the_same_names():
    assert set(get_args(PolicyKL)) == set(KL_ESTIMATORS)
    assert set(get_args(RewardKL)) == {name for name in KL_ESTIMATORS if not name.endswith("+")} | {"k2"}
    from jaxfb.batch_plan import PURPOSES

    assert set(vars(PlansConfig(train=None))) == set(PURPOSES)


def test_entropy_may_be_penalized_as_by_the_loss_itself():
    assert with_(policy={"entropy_coef": -0.01}).policy.entropy_coef == -0.01


BAD_SETTINGS = [
    ({"reward": {"kl_coef": 0.1, "kl_estimator": "k7"}}, "reward.kl_estimator='k7' must be one of k1, k2, k3, abs"),
    ({"reward": {"kl_coef": 0.1, "kl_estimator": "k3+"}}, "reward.kl_estimator='k3.' .*did you mean k3"),
    ({"policy": {"kl_estimator": "k4"}}, r"policy.kl_estimator='k4' must be one of k1, k2, k3, abs, k1\+"),
    ({"reward": {"target": 0.1}}, "target=0.1 steers kl_coef, which is 0 .*reward.kl_coef=0.001"),
    ({"reward": {"kl_coef": 0.1, "target": 0.1, "horizon": 3}}, "horizon=3 must be .* use reward.horizon=4 or more"),
    ({"rollout": {"top_k": 258}}, "top_k=258 must be from 1 to the 257 tokens there are; use rollout.top_k=50"),
    ({"policy": {"options": {"clip_low": "a"}}}, "clip_low='a' must be in"),
    ({"policy": {"options": {"clip": 0.1}}}, "it has clip_low, clip_high, dual_clip"),
    ({"policy": {"aggregation": "seq-mean-token-sum-norm"}}, "needs a positive constant scale"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", BAD_SETTINGS, ids=range(len(BAD_SETTINGS)))
def test_settings_are_refused_before_anything_is_computed(changes, message):
    with pytest.raises(ValueError, match=message):
        make_policy_work(with_(changes))


def test_settings_of_the_loss_of_tokens_are_refused_where_it_is_not_computed():
    for name in ("z_loss", "label_smoothing", "mtp_depth"):
        fresh = with_({"model": {name: 1 if name == "mtp_depth" else 0.1}})
        with pytest.raises(ValueError, match=rf"\[model\] {name}=.* use model.{name}=0"):
            make_base(fresh)
        check_head(changed(fresh, {"warm_start.updates": 1}))
        check_head(changed(fresh, {"model": None, "start.run": "runs/other"}))


class Own:
    """A task of one's own; members are given."""

    def __init__(self, reward=1.0, train=None, held_out=None, correct=True):
        problem = Problem("1+1=", "2")
        self.train = [problem] if train is None else train
        self.held_out = [problem] if held_out is None else held_out
        self._reward, self._correct = reward, correct

    def reward(self, problem, response):
        return self._reward

    def is_correct(self, problem, response):
        return self._correct


@pytest.mark.parametrize(
    "task, message",
    [
        (Own(train=[]), "train is empty, but rollouts draw"),
        (Own(held_out=[]), "held_out is empty, but accuracy is measured on it"),
        (Own(held_out=[Problem("", "2")]), r"the prompt of Problem\(prompt='', answer='2'\) is empty"),
        (Own(None), r"reward=None must be a finite number, for prompt '1\+1=' and response '2'"),
        (Own(float("nan")), "reward=nan must be a finite number, for prompt"),
        (Own(float("inf")), "reward=inf must be a finite number"),
        (
            Own(1e300),
            r"reward=1e\+300 must be a number between -1e\+18 and 1e\+18, so that its square is finite",
        ),
        (Own(-1e19), r"reward=-1e\+19 must be a number between"),
        (Own("1.0"), "reward='1.0' must be a finite number"),
        (Own([1.0]), r"reward=\[1.0\] must be a finite number"),
        (Own(correct=None), r"is_correct=None must be True or False, for prompt '1\+1='"),
        (Own(correct="no"), "is_correct='no' must be True or False"),
        (object(), "lacks train, held_out, reward, is_correct"),
        (Own, "task must be an instance of Own, not the class; call it"),
        (SimpleNamespace(**vars(Own()), reward=1.0, is_correct=bool), "reward must be a function"),
        (Own(train=3), "train must be a list of problems, got 3"),
        (Own(train={"1+1=": "2"}), "train must be a list of problems"),
        (Own(held_out=iter([])), "held_out must be a list of problems, got <list_iterator"),
        (Own(train=[("1+1=", "2")]), r"train\[0\] must be a Problem\(prompt, answer\), got \('1\+1=', '2'\)"),
        (Own(held_out=[Problem("1+1=", "2"), {"prompt": "a"}]), r"held_out\[1\] must be a Problem"),
        (Own(train=[Problem(3, "2")]), r"train\[0\]: prompt must be a string, or messages .*, got 3"),
        (Own(train=[Problem([], "2")]), r"train\[0\]: prompt must be a string, or messages .*, got \[\]"),
        (Own(train=[Problem("\ud800", "2")]), r"train\[0\]: prompt must be text in UTF-8, got '\\ud800'"),
        (Own(train=[Problem("1+1=", None)]), r"train\[0\]: answer must be a string, got None"),
        (Own(train=[Problem([{"role": "user"}], "2")]), r"train\[0\]: content must be a string, got None"),
        (Own(train=[Problem([{"role": "usr", "content": "a"}], "2")]), "role must be .*did you mean 'user'"),
    ],
)
def test_a_task_that_cannot_work_is_refused_before_anything_is_computed(task, message):
    with pytest.raises(ValueError, match=message):
        make_policy_work(with_(), task)


def test_rewards_may_be_of_any_kind_of_number():
    response = Response.of("2", np.array([50, 256]), True)
    for reward in (True, 1, 0.5, np.float32(0.5), np.array(1), -1e18):
        assert checked_reward(Own(reward), Problem("1+1=", "2"), response) == float(reward)
    assert response == "2" and response.ended and response.ids.tolist() == [50, 256]


def test_what_a_resumed_run_may_change_depends_on_where_it_stopped():
    saved = config_to_dict(with_(PPO))
    for change in (
        {"rollout": {"temperature": 0.5}},
        {"policy": {"surrogate": "gspo", "options": {}}},
        {"policy": {"kl_estimator": "k1"}},
        {"advantage": {"name": "gae", "lam": 0.5}},
        {"reward": {"kl_coef": 0.5, "target": 0.1}},
        {"critic": {"learning_rate": 0.01, "clip": None}},
    ):
        config = with_(PPO, change)
        changes = [key for key, _, _ in changes_between(saved, config)]
        with pytest.raises(
            ValueError, match="update 5 lies in the middle of a rollout.* until update 8"
        ) as refusal:
            refuse_other_rollout(saved, config, 5, 4)
        assert all(key in str(refusal.value) for key in changes), changes
        refuse_other_rollout(saved, config, 8, 4)
    for harmless in (
        {"rollout": {"rollouts": 9}},
        {"optimizer": {"learning_rate": 1.0}},
        {"eval": {"every": 3}},
    ):
        refuse_other_rollout(saved, with_(PPO, harmless), 5, 4)


@pytest.mark.parametrize(
    "before, after, key",
    [
        ({}, {"policy": {"kl_coef": 0.0}}, "policy.kl_coef=0.0"),
        ({}, {"rollout": {"importance_cap": 2.0}}, "rollout.importance_cap=2.0"),
        ({}, {"rollout": {"max_new_tokens": 5}}, r"rollout.max_new_tokens=5 \(saved: 4\)"),
        ({}, PPO, "critic.learning_rate=0.01"),
        (PPO, {}, "critic.learning_rate='.absent.'"),
    ],
)
def test_what_decides_the_saved_arrays_cannot_change_at_all(before, after, key):
    with pytest.raises(ValueError, match=rf"cannot change .*{key}"):
        refuse_other_rollout(config_to_dict(with_(before)), with_(after), 8, 4)


def test_advice_for_fine_tuning_names_its_own_keys(tmp_path):
    values = {
        "model": TINY["model"],
        "start": {"tokenizer": "bytes"},
        "conversations": {"path": "unused"},
        "batch": {"rows": 10, "updates": 1},
        "plans": {"train": {"rows_per_microbatch": 4}, "eval": {"rows_per_microbatch": 4}},
        "run": {"dir": str(tmp_path)},
        "optimizer": {"learning_rate": 0.1},
        "mesh": {"data": 2},
    }

    def plans(config):
        rows = lambda base: dict.fromkeys(("train", "eval"), base.config.batch.rows)  # noqa: E731
        return planned(make_base(config), lambda base: base.plans(rows(base), LENGTH))

    config = config_from_dict(values)
    with pytest.raises(
        PlanError, match=r"; use batch.rows=8 or 16, or plans.train.rows_per_microbatch=1 or 5$"
    ) as refusal:
        plans(config)
    for choice in refusal.value.choices:
        assert plans(changed(config, choice)) and set(choice) <= set(all_keys(SFTConfig))


def test_a_policy_is_asked_and_warmed_up_through_the_template():
    from jaxfb.rl.supervised import _answered

    for template, asked in (("none", "1+1="), ("plain", "User: 1+1=\n\nAssistant: ")):
        problem = Problem("1+1=", "2")
        work = make_policy_work(with_({"task": {"template": template}}), Own())
        (ids,) = work.experience._encoded([problem])
        assert work.base.tokenizer.decode(ids) == asked
        assert work.experience.sampler.prompt_width == len(asked)
        assert work.experience.sampler.stop_tokens == (256,)
        rows = _answered(work.base, [([{"role": "user", "content": "1+1="}], "2")], work.experience.length)
        learnt = rows["targets"][rows["loss_mask"] > 0]
        assert learnt.tolist() == [ord("2"), 256]
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    task = Own(train=[Problem(messages, "2")])
    work = make_policy_work(with_({"task": {"template": "plain"}}), task)
    assert work.experience.sampler.prompt_width == len("System: Add.\n\nUser: 1+1=\n\nAssistant: ")


@pytest.mark.parametrize("name, use", [("reward", "0.0"), ("is_correct", "False")])
def test_an_error_of_a_task_is_a_refusal_that_names_its_place_the_prompt_and_the_response(name, use):
    """A run saves what is done before a refusal continues, and tells every process of it."""

    class Raises(Own):
        def reward(self, problem, response):
            raise KeyError("key")

        is_correct = reward

    judge = {"reward": checked_reward, "is_correct": checked_correct}[name]
    place = r"raised KeyError\('key'\) in test_checks.py, line \d+, for prompt '1\+1=' and response '3'"
    with pytest.raises(BadJudgement, match=rf"\[task\] {name} {place}; .* return {use} for") as refusal:
        judge(Raises(), Problem("1+1=", "2"), Response.of("3", np.array([51]), True))
    assert isinstance(refusal.value.__cause__, KeyError)


@pytest.mark.parametrize("judge", [checked_reward, checked_correct])
def test_a_task_that_ends_the_program_is_refused_as_one_that_raises(judge):
    """A reward that ran the code of a response, `exit()`, ended the run unsaved, with exit code 0."""

    class Runs(Own):
        def reward(self, problem, response):
            exec(response)

        is_correct = reward

    with pytest.raises(BadJudgement, match=r"raised SystemExit\(0\) in <string>, line 1, for prompt '1\+1='"):
        judge(Runs(), Problem("1+1=", "2"), Response.of("raise SystemExit(0)", np.array([51]), True))


class Tensor:
    """Stands for one that keeps gradients, which numpy cannot read."""

    def __array__(self, *_, **__):
        raise RuntimeError("detach it first")

    def __repr__(self):
        return "tensor(1.)"


@pytest.mark.parametrize("judge", [checked_reward, checked_correct])
@pytest.mark.parametrize(
    "value, words",
    [(Tensor(), "tensor(1.)"), ([1, [2, 3]], "[1, [2, 3]]"), (list(range(99_999)), "[0, 1, 2,")],
)
def test_a_judgement_that_is_no_single_number_is_refused_in_one_short_sentence(judge, value, words):
    """A tensor ended the run unsaved, with a traceback; a list was printed whole."""

    class Returns(Own):
        def reward(self, problem, response):
            return value

        is_correct = reward

    with pytest.raises(BadJudgement) as refusal:
        judge(Returns(), Problem("1+1=", "2"), Response.of("3", np.array([51]), True))
    assert f"={words}" in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", ["reward", "is_correct"])
def test_a_task_that_changes_its_problem_ends_the_run(name):
    """Later rollouts would begin from other prompts, and those of a resumed run from the first ones again."""

    class Appends(Own):
        def reward(self, problem, response):
            problem.prompt.append({"role": "assistant", "content": str(response)})
            return True

        is_correct = reward

    judge = {"reward": checked_reward, "is_correct": checked_correct}[name]
    problem = Problem([{"role": "user", "content": "1+1="}], "2")
    with pytest.raises(
        BadJudgement, match=rf"\[task\] {name} changed the messages of the prompt .*1\+1=.*a copy"
    ):
        judge(Appends(), problem, Response.of("3", np.array([51]), True))


def test_a_task_for_a_config_that_reads_none_is_refused():
    from jaxfb.config import load_config
    from jaxfb.rl import post_train

    with pytest.raises(
        ValueError, match="task=.* would not be read: this is a config of `jaxfb sft`.*leave task out"
    ):
        post_train(load_config("sft"), task=Own())


@pytest.mark.slow
def test_a_reward_that_fails_in_the_middle_of_a_run_loses_no_update(tmp_path):
    """The first rollout is learnt, the second cannot be judged: the run is saved between them."""
    from jaxfb.rl import post_train
    from jaxfb.training.run_dir import RunDirectory

    class Fails(Own):
        calls = 0

        def reward(self, problem, response):
            self.calls += 1
            return float(len(response)) if self.calls <= 1 + 16 else None  # a trial, and a rollout

    sizes = {"rollouts": 2, "epochs": 1}
    config = with_({"rollout": sizes, "run": {"dir": str(tmp_path / "run")}})
    with pytest.raises(
        BadJudgement, match=r"reward=None .* for prompt '1\+1=' .*; saved after update 2 of 4"
    ):
        post_train(config, task=Fails())
    assert RunDirectory(tmp_path / "run").newest_update() == 2


@pytest.mark.parametrize("unit, length", [("updates", 12), ("samples", 96)])
def test_a_warmup_as_long_as_the_run_is_refused_before_anything_is_made(unit, length):
    """2 updates of 8 rows, twice over each of 3 rollouts."""

    def base(warmup):
        rate = {"name": "linear", "unit": unit, "warmup": warmup}
        return make_base(with_({"rollout": {"rollouts": 3, "epochs": 2}, "lr": rate}))

    base(length - 1)
    with pytest.raises(ValueError, match=f"warmup={length} must be below total={length}"):
        base(length)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_samples_are_drawn_in_the_dtype_of_computing(dtype):
    sizes = TransformerConfig(num_layers=1, hidden_size=8, num_heads=1, mlp_size=8, vocab_size=16)
    sampler = Sampler(sizes, make_mesh(), 4, 4, (0,), compute_dtype=dtype)
    placed = sampler.place(init_params(sizes, jax.random.key(0)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(placed)} == {dtype or "float32"}


def test_prompts_are_shared_out_over_all_devices_but_those_of_one_model():
    sizes = TransformerConfig(num_layers=1, hidden_size=8, num_heads=2, mlp_size=8, vocab_size=16)
    sampler = Sampler(sizes, make_mesh(data=2, fsdp=2, tensor=2), 4, 6, (0,))
    rows, lengths = sampler._padded([np.array([1, 2]), np.array([3]), np.array([4, 5, 6])])
    assert rows.sharding.shard_shape(rows.shape) == (1, 4) and lengths.sharding.shard_shape((4,)) == (1,)
    assert rows[:, :3].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6], [0, 0, 0]] and lengths.tolist() == [
        2,
        1,
        3,
        1,
    ]


@pytest.mark.parametrize("prompts, most", [(4, 1), (6, 1), (9, 9)])
def test_a_rollout_asks_no_problem_twice_unless_there_are_fewer_than_prompts(prompts, most):
    config = with_({"rollout": {"prompts": prompts, "samples_per_prompt": 2}})
    experience = SimpleNamespace(_config=config, problems=SimpleNamespace(train=list("abcdef")))
    places, groups = Experience._drawn(experience, 0)
    assert (places[::2] == places[1::2]).all() and groups.tolist() == np.repeat(
        np.arange(prompts), 2
    ).tolist()
    assert max(Counter(places[::2].tolist()).values()) <= most
    assert (places != Experience._drawn(experience, 1)[0]).any()


def test_a_change_of_a_config_leaves_the_values_it_was_given_as_they_are():
    model = dict(TINY["model"])
    config = changed(with_(), {"model": model, "model.mtp_depth": 1})
    assert config.model.mtp_depth == 1 and "mtp_depth" not in model


def test_a_spike_is_not_rolled_back_and_an_update_with_a_critic_is_not_repeated():
    with pytest.raises(ValueError, match="a policy samples its own rows; use guard.spikes=warn"):
        with_({"guard": {"spikes": "rollback"}, "checkpoint": {"every": 1}})
    with pytest.raises(
        ValueError, match="verify_every=2 computes updates twice, .* use guard.verify_every=null"
    ):
        with_(PPO, {"guard": {"verify_every": 2}})
