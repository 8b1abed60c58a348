"""Problems can be checked, train and held-out ones are apart; rewards sit on last tokens."""

import jax
import numpy as np
import pytest

from jaxfb.config.policy import TaskConfig
from jaxfb.process.position import here
from jaxfb.rl.experience import on_last_token
from jaxfb.rl.tasks import (
    LISTED,
    Arithmetic,
    Problem,
    Response,
    checked_correct,
    checked_reward,
)


def test_arithmetic_is_right_and_held_out_problems_are_apart():
    task = Arithmetic(digits=1, operations="+-*", num_held_out=50)
    assert len(task.train) + len(task.held_out) == 300
    assert not set(task.train) & set(task.held_out)
    for problem in task.train:
        assert str(eval(problem.prompt.removesuffix("="))) == problem.answer
    assert task.train != Arithmetic(digits=1, operations="+-*", num_held_out=50, seed=1).train


def test_only_the_exact_answer_is_rewarded():
    task, problem = Arithmetic(), Problem("47+85=", "132")
    assert [task.reward(problem, text) for text in ("132", "132 ", "13", "")] == [1, 0, 0, 0]


def test_a_problem_is_left_to_train_on_and_listed_once():
    assert len(Arithmetic(digits=1, num_held_out=99).train) == 1
    with pytest.raises(ValueError, match="leaves none of the 100 problems to train on; use at most 99"):
        _ = Arithmetic(digits=1, num_held_out=100).train
    with pytest.raises(ValueError, match=r"leaves none of the \d+ problems .* use at most \d+"):
        _ = Arithmetic(digits=9, num_held_out=LISTED).train
    for make in (Arithmetic, TaskConfig):
        with pytest.raises(ValueError, match=r"operations='\+-\+' gives an operation twice; use '\+-'"):
            make(operations="+-+")


def test_the_reward_of_a_row_is_on_its_last_counted_token():
    mask = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    rewards = on_last_token(np.array([2.0, 3.0, 5.0]), mask)
    np.testing.assert_array_equal(rewards, [[0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]])


def test_each_reward_is_progress_to_the_check_for_hung_processes():
    """A rollout of many slow rewards was taken for one step that hangs, and so again after each restart."""
    task = Arithmetic(1, "+", 10)
    before = here.ticks
    checked_reward(task, task.train[0], Response.of("1", np.array([49]), False))
    assert here.ticks == before + 1
    checked_correct(task, task.train[0], Response.of("1", np.array([49]), False))
    assert here.ticks == before + 2


@pytest.mark.parametrize("judge", [checked_reward, checked_correct])
def test_a_setting_of_jax_that_a_reward_changes_is_changed_back(judge):
    """What a run trained from then on had other bits than before, without a word."""

    class Changes:
        def reward(self, problem, response):
            jax.config.update("jax_default_matmul_precision", "bfloat16")
            return True

        is_correct = reward

    before = jax.config.jax_default_matmul_precision
    with pytest.warns(UserWarning, match=f"jax_default_matmul_precision from {before} to bfloat16"):
        assert judge(Changes(), Problem("1+1=", "2"), Response("2"))
    assert jax.config.jax_default_matmul_precision == before
