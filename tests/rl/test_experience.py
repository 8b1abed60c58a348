"""What becomes of responses: greedy ones are counted once each, rewards stand on last tokens less the KL."""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.kl import AdaptiveKL
from jaxfb.rl.experience import Experience, Models
from jaxfb.rl.policy import PolicyWork
from jaxfb.rl.tasks import Problem, Response
from jaxfb.types import Pipelined, Unembedding
from tests.rl.test_checks import with_


class Echo:
    """A sampler whose response is the prompt; all its calls have the same number of prompts."""

    def __init__(self):
        self.sizes = set()

    def place(self, params):
        return params

    def __call__(self, placed, prompts, key, greedy):
        assert greedy and key is None
        self.sizes.add(len(prompts))
        return prompts


def test_each_held_out_problem_is_counted_once_however_many_fit_one_call():
    problems = [Problem(str(number), "even") for number in range(6)]
    task = SimpleNamespace(is_correct=lambda problem, response: int(response) % 2 == 0)
    experience = SimpleNamespace(
        sampler=Echo(),
        task=task,
        plan=SimpleNamespace(rows=4),
        once=lambda compute: compute(),
        _encoded=lambda problems: [problem.prompt for problem in problems],
        _texts=lambda responses: [Response.of(text, [0], True) for text in responses],
    )
    experience._solved = partial(Experience._solved, experience)
    assert Experience.accuracy(experience, None, problems) == 0.5
    assert (
        Experience.accuracy(experience, None, problems[:5]) == 0.6
    )  # the fifth, which fills its call up, is even
    assert experience.sampler.sizes == {4}


@pytest.mark.parametrize("target", [None, 0.5])
def test_a_reward_stands_on_the_last_token_less_the_kl_of_each(target):
    rewards, mask = np.array([1.0, 2.0, 3.0]), np.array([[0, 1, 1], [1, 1, 0], [0, 0, 0]])
    scores = {
        "old_log_probs": np.array([[9, -1, -2], [-3, -1, 9], [9, 9, 9.0]]),
        "ref_log_probs": np.full((3, 3), -2.0),
    }
    sections = {"reward": {"kl_coef": 0.1, "kl_estimator": "k1", "target": target}}
    experience, record = SimpleNamespace(_config=with_(sections)), {}
    kl = AdaptiveKL(0.1, target or 6.0, 100)
    found, after = Experience._token_rewards(experience, rewards, mask, scores, kl, record)
    np.testing.assert_allclose(found, [[0, -0.1, 1.0], [0.1, 2 - 0.1, 0], [0, 0, 0]])
    # the mean over rows with tokens of (1 + 0) / 2 and (-1 + 1) / 2
    assert record == {"reward_kl": pytest.approx(0.25), "reward_kl_coefficient": 0.1}
    wanted = 0.1 if target is None else 0.1 * (1 - 0.2 * 3 / 100)
    assert after.coefficient == pytest.approx(wanted)


def test_each_model_of_a_rollout_scores_with_its_own_parameters():
    """Rows by the policy that sampled, the reference that it started from and the critic, each with its own plan."""

    def forward(model, params, rows, plan):
        asked.append((model, params, plan))
        return {"log_probs": np.full((1, 2), -len(asked)), "values": np.full((1, 2), 7.0)}

    asked, rows = [], {"loss_mask": np.array([[0, 1]])}
    sections = {"policy": {"kl_coef": 0.1}, "rollout": {"log_probs": "recompute", "importance_cap": 2.0}}
    experience = SimpleNamespace(
        _config=with_(sections),
        plan=SimpleNamespace(plan=lambda purpose: purpose),
        value_model="values",
        _log_probs="log-probs",
        _forward=forward,
    )
    experience._pass = partial(Experience._pass, experience)
    models, record = Models("policy", "reference", "critic"), {}
    scores = Experience._scores(experience, rows, models, np.array([[0, -1.5]]), record)
    assert asked == [
        ("log-probs", "policy", "logprob_old"),
        ("log-probs", "reference", "logprob_ref"),
        ("values", "critic", "value"),
    ]
    assert [scores[name][0, 1] for name in ("old_log_probs", "ref_log_probs", "values", "old_values")] == [
        -1,
        -2,
        7,
        7,
    ]
    assert record["sampler_gap"] == 0.5
    np.testing.assert_allclose(scores["rollout_weights"], [[0, np.exp(0.5)]])


def test_log_probs_are_those_of_the_sampler_that_never_draws_some_ids():
    """Of five ids the last two; the temperature divides the logits."""
    model = Pipelined(None, None, None, unembed=lambda outer, hidden: Unembedding(hidden, outer["head"]))
    base = SimpleNamespace(model=model, absent_ids=((3, 5),))
    config = with_({"rollout": {"temperature": 0.5}})
    scored = Experience._log_probs.func(SimpleNamespace(_config=config, base=base))
    microbatch = {"targets": jnp.array([[0, 1]]), "loss_mask": jnp.ones((1, 2))}
    logits = jnp.array([[1.0, 0, 0, 9, 9]])
    out = scored.head({"head": logits}, jnp.ones((1, 2, 1)), microbatch, None)
    total = np.log(np.exp(2.0) + 2)
    np.testing.assert_allclose(out.outputs["log_probs"], [[2 - total, -total]], rtol=1e-6)


@pytest.mark.parametrize("has_reference", [True, False])
def test_a_rollout_is_made_by_the_policy_and_compared_with_what_it_started_from(has_reference):
    """The reference has only what is trained; the rest is the policy's."""
    policy, start = {"trained": 1, "frozen": 2}, {"trained": 3, "frozen": None}
    given = []
    work = SimpleNamespace(
        critic=SimpleNamespace(state=SimpleNamespace(params="critic")),
        train_state=SimpleNamespace(params=policy),
        experience=SimpleNamespace(rollout=lambda *made: given.append(made) or ("rows", {}, "after")),
        _reference=start if has_reference else None,
        _record={},
        _kl="before",
    )
    PolicyWork._roll_out(work, 4)
    ((number, models, kl),) = given
    reference = {"trained": 3, "frozen": 2} if has_reference else None
    assert (number, kl, models) == (4, "before", Models(policy, reference, "critic"))
    assert (work._rows, work._kl) == ("rows", "after")


def test_rollouts_that_teach_nothing_are_counted_over_the_whole_run():
    """They are reported at 1, 2, 4, ... of them."""
    said, shares = [], iter([1, 0.5, 1, 1, 0, 1])
    work = SimpleNamespace(
        critic=None,
        train_state=SimpleNamespace(params=None),
        experience=SimpleNamespace(
            rollout=lambda *_: ("rows", {"groups_without_signal": next(shares)}, None)
        ),
        say=said.append,
        _reference=None,
        _record={},
        _kl=None,
    )
    work._count_signal = partial(PolicyWork._count_signal, work)
    counts = []
    for number in range(6):
        PolicyWork._roll_out(work, number)
        counts.append(work._record["rollouts_without_signal"])
    assert counts == [1, 1, 2, 3, 3, 4]
    assert [text.split(":")[0] for text in said] == ["rollout 1", "rollout 3", "rollout 6"]
