"""A policy of two processes whose task fails in the third rollout; run by `test_post_training_hosts.py`.

Arguments: the directory of tiny.yaml, the process, the coordinator's port, and how it fails.
"""

import sys
from pathlib import Path

from jaxfb import load_config
from jaxfb.rl import post_train
from jaxfb.rl.tasks import Arithmetic


class Fails(Arithmetic):
    calls = 0

    def reward(self, problem, response):
        Fails.calls += 1
        if Fails.calls > 1 + 2 * 16:  # a trial, and two rollouts
            FAILURES[how](self)
        return float(len(response))


def raises(task):
    raise KeyError("key")


def drops(task):
    """As a curriculum that leaves out what is solved; process 0 alone, which computes the rewards."""
    task.train.pop()


FAILURES = {"raises": raises, "drops": drops}
directory, index, port, how = sys.argv[1:]
place = [f"hosts.coordinator=127.0.0.1:{port}", "hosts.processes=2", f"hosts.process_id={index}"]
post_train(load_config(Path(directory) / "tiny.yaml", place), task=Fails(1, "+", 6))
