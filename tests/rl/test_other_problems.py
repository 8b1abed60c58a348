"""The problems of a policy have a fingerprint: processes with others stop, and a run is not resumed with others."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxfb.config import config_to_dict
from jaxfb.rl.policy import make_policy_work
from jaxfb.rl.sampler import Responses
from jaxfb.rl.tasks import BadJudgement, Problem
from jaxfb.training.job.agreement import check_agreement
from tests.rl.test_checks import with_

WORDS = ("alpha", "beta", "gamma")


class Words:
    """Words that are to be answered with their first letter."""

    def __init__(self, words=WORDS, answers=None, held_out=("mu",)):
        self.train = [Problem(word, letter) for word, letter in zip(words, answers or "abg", strict=True)]
        self.held_out = [Problem(word, word[0]) for word in held_out]

    def reward(self, problem, response):
        return float(response == problem.answer)

    def is_correct(self, problem, response):
        return response == problem.answer


def work(task=None, *changes):
    return make_policy_work(with_(*changes), task or Words())


OTHERS = {
    "order": Words(("beta", "alpha", "gamma"), "bag"),
    "prompts": Words(("alpha", "beta", "delta")),
    "answers": Words(answers="abc"),
    "held out": Words(held_out=("nu",)),
}


@pytest.mark.parametrize("task", OTHERS.values(), ids=OTHERS)
def test_processes_with_other_problems_stop(task):
    assert work().facts() == work().facts()
    with pytest.raises(
        ValueError, match=r"differ in .*: text: train is \w{16} on process 0 \(a\) but \w{16}"
    ):
        check_agreement("text, plan or devices", [work().facts(), work(task).facts()], ["a", "b"])


def test_processes_with_another_template_stop():
    facts = [work().facts(), work(None, {"task": {"template": "plain"}}).facts()]
    with pytest.raises(ValueError, match="text: train is"):
        check_agreement("text, plan or devices", facts, ["a", "b"])


@pytest.mark.parametrize("task", OTHERS.values(), ids=OTHERS)
def test_a_run_is_resumed_with_other_problems_only_if_that_is_allowed(task):
    saved = work()
    record = {"plan": saved.to_dict(), "config": config_to_dict(with_()), "update": 4}
    work().check_resume(record, False)
    with pytest.raises(
        ValueError,
        match="trained on other problems .* or --allow-changes .allow_changes=True in a program. to continue",
    ):
        work(task).check_resume(record, False)
    work(task).check_resume(record, True)


def test_a_run_of_before_there_was_a_fingerprint_is_resumed():
    plan = {name: value for name, value in work().to_dict().items() if name != "text"}
    work(OTHERS["answers"]).check_resume(
        {"plan": plan, "config": config_to_dict(with_()), "update": 4}, False
    )


def judged(experience, number=0):
    """The rewards of one rollout, whose responses are all "a"."""
    places, _ = experience._drawn(number)
    ids = [np.array([97], np.int32)] * len(places)
    return experience._rewards(places, Responses(ids, [np.zeros(1)] * len(ids), np.zeros(len(ids), bool)))


class Changing(Words):
    """Changes its problems once it is told to, in a reward, which process 0 alone computes."""

    change = None

    def reward(self, problem, response):
        if self.change:
            self.change()
        return super().reward(problem, response)


CHANGES = {
    "drops": (lambda task: len(task.train) > 1 and task.train.pop(), "has 1 problems and had 3"),
    "orders": (lambda task: task.train.sort(reverse=True), "has '\\w+' as problem . and had '\\w+'"),
}


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_a_task_that_changes_its_problems_ends_the_run(change, words):
    """The other processes would draw from the list as it was, and a resumed run too."""
    task = Changing()
    experience = work(task, {"rollout": {"prompts": 4, "samples_per_prompt": 4}}).experience
    assert judged(experience)[0].shape == (16,)
    task.change = lambda: change(task)
    with pytest.raises(
        BadJudgement, match=rf"\[task\] train {words} when the run began: .*allow_changes=True"
    ):
        judged(experience)
    untouched = work(Words(), {"rollout": {"prompts": 4, "samples_per_prompt": 4}}).experience
    assert experience.problems == untouched.problems


def test_a_task_that_changes_its_problems_at_its_trial_is_refused():
    task = Changing()
    task.change = task.train.clear
    with pytest.raises(BadJudgement, match="train has 0 problems and had 3 when the run began"):
        work(task)


class MadeWhenRead:
    """A list that makes each problem, an object of no special class, when it is read."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def __getitem__(self, place):
        return SimpleNamespace(prompt=self.words[place], answer="a", made=object())


def test_problems_that_are_made_when_they_are_read_are_the_same_problems():
    task = Words()
    task.train = MadeWhenRead(WORDS)
    assert judged(work(task).experience)[0].all()
