"""A policy run: the sampler speaks as the model does, other plans change nothing, and stopping leaves no trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.batch_plan import PlanError
from jaxfb.cli.commands import main
from jaxfb.config import RLConfig, config_to_dict
from jaxfb.config.load import config_from_dict
from jaxfb.losses.advantages import grpo
from jaxfb.rl import post_train
from jaxfb.rl.experience import Experience, Models
from jaxfb.rl.policy import make_policy_work
from jaxfb.rl.sampler import Responses, Sampler
from jaxfb.rl.tasks import Arithmetic, Problem
from jaxfb.training.ending import after_failures
from jaxfb.training.guard import NonFiniteAbort
from jaxfb.update.train_state import NonFinite
from jaxfb.update.train_step import StepMetrics, make_train_step

TINY = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 16, "tied_embeddings": True},
    "start": {"tokenizer": "bytes"},
    "task": {"digits": 1, "held_out": 10},
    "rollout": {
        "prompts": 4,
        "samples_per_prompt": 4,
        "rows_per_update": 8,
        "rollouts": 2,
        "epochs": 2,
        "max_new_tokens": 4,
    },
    "policy": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "plans": {
        "train": {"rows_per_microbatch": 4},
        "logprob_old": {"rows_per_microbatch": 8},
        "logprob_ref": {"rows_per_microbatch": 16},
        "critic": {"rows_per_microbatch": 8},
        "value": {"rows_per_microbatch": 16},
    },
    "run": {"dir": "unused"},
    "optimizer": {"learning_rate": 0.01},
    "mesh": {"data": 1},
    "precision": {"compute_dtype": "float64"},
}
PPO = {
    "advantage": {"name": "gae"},
    "critic": {"learning_rate": 0.01},
    "reward": {"kl_coef": 0.05, "target": 0.1},
}


def one_update(work, number):
    """What the training loop does for one update."""
    return work.update(number, work.read(number))


class Evens(Arithmetic):
    """Rewards that a random policy earns: the share of even bytes."""

    def reward(self, problem: Problem, response: str) -> float:
        return float(np.mean([ord(c) % 2 == 0 for c in response] or [0.0]))


def config(tmp_path, *more, **sections) -> RLConfig:
    values = {**TINY, "run": {"dir": str(tmp_path / "run")}}
    for changes in (*more, sections):
        for name, change in changes.items():
            values[name] = {**values.get(name, {}), **change}
    return config_from_dict(values)


def started(config):
    work = make_policy_work(config, Evens(1, "+", 10))
    work.start(lambda text: None)
    return work


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same_bits(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_on_step_0_the_sampler_is_the_training_forward_and_the_ratio_is_1(tmp_path):
    work = started(config(tmp_path, rollout={"temperature": 0.7, "importance_cap": 2.0}))
    metrics, record = one_update(work, 0)
    assert record["sampler_gap"] < 1e-12
    np.testing.assert_allclose(record["importance_weight_max"], 1, atol=1e-12)
    np.testing.assert_allclose(metrics.metrics["rollout_weight"], 1, atol=1e-12)
    np.testing.assert_allclose(metrics.metrics["ratio"], 1, atol=1e-12)
    np.testing.assert_allclose(metrics.metrics["approx_kl"], 0, atol=1e-12)
    assert metrics.metrics["clip_fraction"] == 0 and metrics.metrics["ref_kl"] < 1e-12


@pytest.mark.slow
def test_the_record_says_what_happened(tmp_path):
    _, record = one_update(started(config(tmp_path)), 0)
    named = {
        "reward",
        "accuracy",
        "response_length",
        "rollout_tokens_per_second",
        "tokens_per_second",
        "padding_fraction",
    }
    assert named <= set(record)
    assert 0 <= record["padding_fraction"] < 1 and record["tokens"] > 0


OTHER_PLANS = {
    "logprob_old": {"rows_per_microbatch": 2},
    "logprob_ref": {"rows_per_microbatch": None, "max_tokens_per_microbatch": 40, "packing": True},
}


@pytest.mark.slow
def test_changing_any_other_plan_changes_no_bit_of_the_update(tmp_path):
    """The same rows of a rollout, updated by two runs that differ in every plan but that of training."""
    one, other = started(config(tmp_path)), started(config(tmp_path, {"plans": OTHER_PLANS}))
    one_update(one, 0)
    other._rows, other._record = one._rows, one._record
    one_update(one, 1)
    other.train_state = other.step.init(
        jax.tree.map(np.asarray, started(config(tmp_path)).train_state.params), 0
    )
    again = started(config(tmp_path))
    again._rows, again._record = one._rows, one._record
    one_update(again, 1)
    one_update(other, 1)
    same_bits(other.train_state.params, again.train_state.params)


@pytest.mark.slow
def test_rollouts_do_not_depend_on_how_their_passes_are_cut(tmp_path):
    one, other = started(config(tmp_path)), started(config(tmp_path, {"plans": OTHER_PLANS}))
    one_update(one, 0)
    one_update(other, 0)
    for name, leaf in one._rows.items():
        np.testing.assert_allclose(leaf, other._rows[name], rtol=0, atol=1e-12, err_msg=name)
    for a, b in zip(leaves(one.train_state.params), leaves(other.train_state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"mesh": {"data": 2}, "plans": {"train": {"max_tokens_per_microbatch": 24, "packing": True}}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh": {"pipe": 2, "data": 2}, "plans": {"train": {"rows_per_microbatch": 2}}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["packed on 2 replicas", "pipeline"],
)
def test_the_mesh_and_the_cut_change_nothing(tmp_path, changes):
    one, other = started(config(tmp_path)), started(config(tmp_path, changes))
    for number in range(2):
        (a, _), (b, _) = one_update(one, number), one_update(other, number)
        np.testing.assert_allclose(a.loss, b.loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(a.grad_norm, b.grad_norm, rtol=1e-10)


@pytest.mark.parametrize("kind", [{}, pytest.param(PPO, marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_stopped_in_the_middle_of_a_rollout_it_ends_in_the_same_bits(tmp_path, kind):
    from jaxfb.checkpoint.store import CheckpointStore

    def arrays(path, settings):
        work = make_policy_work(settings, Evens(1, "+", 10))
        return CheckpointStore(path / "checkpoints", keep_best=None).restore(work.abstract_state())[0]

    whole = config(tmp_path / "whole", kind)
    post_train(whole, task=Evens(1, "+", 10))
    parts = config(tmp_path / "parts", kind)

    class Stop(Exception):
        pass

    from jaxfb.callbacks import callback

    def stop(step, directory):
        if step == 5:
            raise Stop

    every = dataclasses.replace(parts, checkpoint=dataclasses.replace(parts.checkpoint, every=5))
    with pytest.raises(Stop):
        post_train(every, task=Evens(1, "+", 10), callbacks=[callback(on_save=stop)])
    result = post_train(every, task=Evens(1, "+", 10), resume=True)
    assert (result.status, result.updates) == ("finished", 8)
    one, other = arrays(tmp_path / "whole" / "run", whole), arrays(tmp_path / "parts" / "run", parts)
    keys = jax.random.key_data
    for tree in (one, other, *(t["critic"] for t in (one, other) if "critic" in t)):
        tree["rng"] = keys(tree["rng"])
    same_bits(one, other)


def test_a_purpose_without_a_plan_is_refused_before_anything_runs(tmp_path):
    cuts = {name: cut for name, cut in TINY["plans"].items() if name != "logprob_ref"}
    values = {**TINY, "plans": cuts, "mesh": {"data": 2}}
    with pytest.raises(
        PlanError, match=r"\[logprob_ref\] needs plans.logprob_ref .*nothing is inherited"
    ) as refused:
        make_policy_work(config_from_dict(values))
    assert refused.value.choices == (
        {"plans.logprob_ref.rows_per_microbatch": 8},
    )  # of 16 rows on 2 replicas


@pytest.mark.parametrize(
    "name",
    [
        "dr_grpo",
        "rloo",
        pytest.param("remax", marks=pytest.mark.slow),
        pytest.param("reinforce_plus_plus", marks=pytest.mark.slow),
        pytest.param("opo", marks=pytest.mark.slow),
        pytest.param("gpg", marks=pytest.mark.slow),
    ],
)
def test_every_estimator_makes_advantages_that_differ_by_row(tmp_path, name):
    work = started(config(tmp_path, advantage={"name": name}, rollout={"epochs": 1, "rollouts": 1}))
    work._roll_out(0)
    assert np.ptp(work._rows["advantages"]) > 0
    assert (work._rows["advantages"][work._rows["loss_mask"] == 0] == 0).all()


@pytest.mark.slow
def test_a_mask_that_went_astray_is_found(tmp_path):
    work = started(config(tmp_path, policy={"aggregation": "token-mean"}))
    work._roll_out(0)
    metrics, _ = work.step(work.train_state, {name: leaf[:8] for name, leaf in work._rows.items()}), None
    rows = {name: leaf[:8].copy() for name, leaf in work._rows.items()}
    work._check_weight(jax.device_get(metrics[1]), rows)
    rows["loss_mask"][0] = 0
    with pytest.raises(
        RuntimeError, match='term "policy": Σ weight .* ≠ .* counted in the rows of this update'
    ):
        work._check_weight(jax.device_get(metrics[1]), rows)


def test_a_pipeline_with_too_few_microbatches_is_warned_of(tmp_path):
    with pytest.warns(
        UserWarning, match=r"\[logprob_ref\] 1 microbatches in a pipeline of 2 stages leave it idle 50%"
    ):
        make_policy_work(config(tmp_path, {"mesh": {"pipe": 2}}))


def test_as_many_microbatches_as_stages_are_not_warned_of(recwarn):
    cuts = {name: {"num_microbatches": 2} for name in TINY["plans"]}
    make_policy_work(config_from_dict({**TINY, "mesh": {"pipe": 2}, "plans": cuts}))
    assert not [str(one.message) for one in recwarn if "leave it idle" in str(one.message)]


@pytest.mark.slow
def test_in_float16_policy_and_critic_scale_their_losses_and_are_saved_with_the_scale(tmp_path):
    work = started(config(tmp_path, PPO, precision={"compute_dtype": "float16"}))
    for state, abstract in (
        (work.state(), work.abstract_state()),
        (work.critic.state, work.critic.abstract_state()),
    ):
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
    assert work.critic.state.loss_scale is not None


class Recorded(Evens):
    """Keeps the responses that it rewards."""

    def reward(self, problem: Problem, response: str) -> float:
        self.__dict__.setdefault("seen", []).append(response)
        return super().reward(problem, response)


@pytest.mark.slow
def test_ids_that_the_tokenizer_lacks_are_never_sampled_and_rewards_see_the_ids(tmp_path):
    """257 ids in a vocabulary of 384: a random policy would draw every third token from the padding."""
    work = make_policy_work(
        config(tmp_path, rollout={"max_new_tokens": 16, "temperature": 2.0}), Recorded(1, "+", 10)
    )
    work.start(lambda text: None)
    work.task.seen.clear()  # of the answer that was tried beforehand
    metrics, record = one_update(work, 0)
    seen = work.task.seen
    assert work.base.sizes.vocab_size == 384 and work.base.absent_ids == ((257, 384),)
    ids = np.concatenate([response.ids for response in seen])
    assert ids.max() <= 256 and len(ids) > 200
    decode = work.base.tokenizer.decode
    for response in seen:
        assert response.ended == (response.ids[-1] == 256)
        assert response == decode(response.ids[: len(response.ids) - response.ended])
    # the log-prob pass and the update leave the same ids out
    assert record["sampler_gap"] < 1e-12
    np.testing.assert_allclose(metrics.metrics["ratio"], 1, atol=1e-12)
    assert np.log(200) < metrics.metrics["policy_entropy"] < np.log(257)


def test_a_rollout_of_an_earlier_version_with_ids_that_are_never_sampled_does_not_go_on(tmp_path):
    """Its saved log-probs are of another policy: a run went on with ratios of 1e-9."""
    settings = config(tmp_path)
    work = make_policy_work(settings, Evens(1, "+", 10))
    work.start(lambda text: None)
    one_update(work, 0)
    record = {"update": 1, "plan": work.to_dict(), "config": config_to_dict(settings), **work.host(1)}

    def resumed(allow_changes=False, update=1):
        again = make_policy_work(settings, Evens(1, "+", 10))
        at = {**record, "update": update}
        again.check_resume(at, allow_changes)
        again.restore(jax.tree.map(jnp.copy, work.state()), at, allow_changes)

    resumed()
    mask, targets = work._rows["loss_mask"], work._rows["targets"].copy()
    targets[mask == 0] = 300  # of a prompt or of padding: nothing was sampled
    work._rows["targets"] = targets
    resumed()
    targets[tuple(np.argwhere(mask != 0)[-1])] = 383
    with pytest.raises(
        ValueError, match=r"update 1 .* such as 383 \(1 of \d+\); .*start.run=.*--allow-changes"
    ):
        resumed()
    resumed(allow_changes=True)
    resumed(update=work.plan.updates_per_rollout)  # its rows were used


def test_a_response_that_ends_exactly_at_the_limit_is_not_counted_as_cut():
    from jaxfb.rl.experience import _numbers_of
    from jaxfb.rl.sampler import _cut

    responses = _cut(np.array([[5, 5, 9], [5, 5, 5], [8, 9, 9]]), np.zeros((3, 3)), (8, 9))
    assert [len(ids) for ids in responses.ids] == [3, 3, 1]
    np.testing.assert_array_equal(responses.ended, [True, False, True])
    numbers = _numbers_of(np.zeros(3), np.zeros(3), responses, 1.0)
    np.testing.assert_allclose(numbers["at_length_limit"], 1 / 3)
    assert numbers["response_length_max"] == 3


ROWS = {name: np.ones((8, 8), np.int32) for name in ("tokens", "segments")}


def step_metrics(critic, failed=False, **given):
    """Makes metrics of an update of a critic; failed: its gradients were not finite."""
    fine = np.zeros(len(jax.tree.leaves(critic.abstract_state().params)), bool)
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(StepMetrics)), 0.0)
    return StepMetrics(**{**zeros, "nonfinite": NonFinite(False, fine | failed, fine, fine), **given})


EXPERTS = {"model": {"num_experts": 2, "experts_per_token": 1, "expert_mlp_size": 8}}


def test_a_critic_with_experts_records_their_load_as_the_policy_does(tmp_path, monkeypatch):
    """The update itself is left out, which would be compiled for this; the slow test below makes one."""
    critic = make_policy_work(config(tmp_path, PPO, EXPERTS), Evens(1, "+", 10)).critic
    given = {"value": np.float64(0.5), "expert_load": np.array([[1.5, 0.5], [1.0, 1.0]])}
    metrics = step_metrics(critic, metrics=given)
    monkeypatch.setattr(critic, "step", lambda state, batch: (state, metrics))
    record = critic.update(0, ROWS)
    assert record["critic/value"] == 0.5
    assert record["critic/expert_load"] == [[1.5, 0.5], [1.0, 1.0]]
    assert (record["critic/expert_load/min"], record["critic/expert_load/max"]) == (0.5, 1.5)


def test_a_run_ends_whose_critic_is_never_updated(tmp_path, monkeypatch):
    """Its policy went on, on advantages of a critic that never learnt."""
    work = make_policy_work(config(tmp_path, PPO, run={"max_nonfinite": 3}), Evens(1, "+", 10))
    heard, metrics = [], step_metrics(work.critic, failed=True, metrics={}, skipped=True)
    monkeypatch.setattr(work.critic, "step", lambda state, batch: (state, metrics))
    work.say = heard.append
    assert work.critic.update(0, ROWS)["critic/skipped"]
    work.critic.update(1, ROWS)
    with pytest.raises(NonFiniteAbort, match="3 updates of the critic in a row, up to update 3") as ended:
        work.critic.update(2, ROWS)
    assert "lower critic.learning_rate or" in after_failures(0, "again", ended.value.rate)
    assert [text.split(":")[0] for text in heard] == [f"update {n} of the critic skipped" for n in (1, 2, 3)]


def test_a_state_is_restored_without_a_resume_as_a_replay_does(tmp_path):
    """`jaxfb replay` of any policy's dump ended in an AttributeError."""
    work = make_policy_work(config(tmp_path, PPO), Evens(1, "+", 10))
    work.restore(work.abstract_state(), {"work": {"record": {}, "kl_coefficient": 0.25}}, False)
    assert work._kl.coefficient == 0.25


@pytest.mark.slow
def test_the_dump_of_a_critic_that_was_given_up_is_computed_again(tmp_path, capsys):
    changes = {"critic": {"learning_rate": 1e39}, "precision": {"compute_dtype": "float32"}}
    settings = config(tmp_path, PPO, changes, run={"max_nonfinite": 2})
    with pytest.raises(NonFiniteAbort, match="2 updates of the critic in a row, up to update 2"):
        post_train(settings)
    assert main(["replay", str(tmp_path / "run" / "dumps" / "update-000002")]) == 0
    printed = capsys.readouterr().out
    assert "update 2 of the critic skipped" in printed and "update 2 computed again" in printed


def test_the_gradients_of_a_critic_are_clipped_to_its_own_norm(tmp_path, monkeypatch):
    """The step is only made here, not compiled."""
    given = {}

    def make(*arguments, **options):
        given.update(options)
        return make_train_step(*arguments, **options)

    monkeypatch.setattr("jaxfb.rl.critic.make_train_step", make)
    for norm in (0.25, None):
        changes = {"critic": {"max_grad_norm": norm}, "optimizer": {"max_grad_norm": 3.0}}
        make_policy_work(config(tmp_path, PPO, changes), Evens(1, "+", 10))
        assert given["max_grad_norm"] == norm


class Lengths(Evens):
    """Rewards a response by its length."""

    def reward(self, problem: Problem, response: str) -> float:
        return float(len(response.ids))


def test_the_baseline_of_remax_is_the_reward_of_the_greedy_response(tmp_path, monkeypatch):
    settings = config(tmp_path, advantage={"name": "remax"}, policy={"kl_coef": 0.0})
    work = make_policy_work(settings, Lengths(1, "+", 10))

    def sampled(self, placed, prompts, key, greedy=False):
        rows = np.arange(len(prompts))
        lengths = np.where(greedy, 1 + rows // 4, 4 - rows % 2)  # of prompts of four rows each
        assert (key is None) == greedy
        ids = [np.full(length, 65, np.int32) for length in lengths]
        return Responses(ids, [np.zeros(length) for length in lengths], np.zeros(len(rows), bool))

    monkeypatch.setattr(Sampler, "place", lambda self, params: params)
    monkeypatch.setattr(Sampler, "__call__", sampled)
    monkeypatch.setattr(
        Experience, "_pass", lambda self, purpose, params, rows: np.zeros(rows["tokens"].shape)
    )
    rollout = work.experience.rollout(0, Models({}, None, None), work._kl)
    rows, mask = np.arange(16), rollout.rows["loss_mask"] > 0
    wanted = (4 - rows % 2) - (1 + rows // 4)
    np.testing.assert_array_equal(rollout.rows["advantages"], np.where(mask, wanted[:, None], 0))
    assert rollout.record["reward"] == 3.5  # of what was sampled


@pytest.mark.slow
def test_a_policy_and_a_critic_with_experts_are_the_same_on_a_mesh(tmp_path):
    mesh = {"mesh": {"data": 2, "expert": 2}, "plans": {"train": {"rows_per_microbatch": 2}}}
    mesh["plans"]["critic"] = {"rows_per_microbatch": 1}
    one, other = started(config(tmp_path, PPO, EXPERTS)), started(config(tmp_path, PPO, EXPERTS, mesh))
    for number in range(2):
        (a, first), (b, second) = one_update(one, number), one_update(other, number)
        np.testing.assert_allclose(a.loss, b.loss, rtol=0, atol=1e-12)
        for name in ("critic/loss", "critic/grad_norm", "critic/expert_load", "critic/router_entropy"):
            np.testing.assert_allclose(first[name], second[name], rtol=0, atol=1e-12, err_msg=name)


class Same(Evens):
    """Every response is worth the same."""

    def reward(self, problem: Problem, response: str) -> float:
        return 0.5


@pytest.mark.slow
def test_prompts_without_a_better_and_a_worse_sample_are_counted_and_reported(tmp_path):
    sizes = {"rollouts": 3, "epochs": 1, "rows_per_update": 16}
    quiet = {"policy": {"kl_coef": 0.0, "entropy_coef": 0.0}, "plans": {"train": {"rows_per_microbatch": 16}}}
    work = make_policy_work(config(tmp_path, quiet, rollout=sizes), Same(1, "+", 10))
    heard = []
    work.say = heard.append
    work.start(lambda text: None)
    for number in range(3):
        metrics, record = one_update(work, number)
        assert metrics.grad_norm == 0 and record["groups_without_signal"] == 1
        assert record["rollouts_without_signal"] == number + 1
    assert len(heard) == 2 and "rollout 2: all samples of each prompt have the same reward" in heard[1]
    assert work.summary()["rollouts_without_signal"] == 3
    rewards, groups = np.array([1, 1, 0, 1, 2, 2.0]), np.array([0, 0, 1, 1, 2, 2])
    from jaxfb.rl.experience import _share_without_signal

    np.testing.assert_allclose(_share_without_signal(rewards, groups), 2 / 3)


def test_a_single_sample_of_a_prompt_is_without_signal_only_if_its_reward_is_0():
    """It keeps its reward as its advantage, so the updates do learn."""
    from jaxfb.rl.experience import _share_without_signal

    rewards, groups = np.array([1.0, 0.0, 2.0, 2.0]), np.array([0, 1, 2, 2])
    assert _share_without_signal(rewards, groups) == 2 / 3
    advantages = grpo(rewards, groups, np.ones((4, 1)))
    np.testing.assert_array_equal(advantages[:, 0] != 0, [True, False, False, False])
