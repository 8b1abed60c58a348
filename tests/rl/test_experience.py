"""What becomes of responses: greedy ones are counted once each, rewards stand on last tokens less the KL."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jaxfb.losses.kl import AdaptiveKL
from jaxfb.rl.experience import Experience
from jaxfb.rl.tasks import Problem, Response
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
