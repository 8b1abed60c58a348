"""Callbacks hear the same hooks in the same order, with the same run, from pre-training and from post-training."""

import jax
import numpy as np
import pytest

from jaxfb import trainer
from jaxfb.callbacks import HOOKS, RunInProgress, callback
from jaxfb.config import load_config
from jaxfb.rl import post_train
from jaxfb.update.train_step import TrainState
from tests.rl.test_policy import Evens, config
from tests.rl.test_supervised import DPO, SFT, write
from tests.tiny import write_tiny

ATTRIBUTES = RunInProgress.__annotations__


def recorder():
    heard, runs = [], []

    def hook(name):
        def record(*arguments):
            heard.append((name, arguments))

        return record

    hooks = {name: hook(name) for name in HOOKS}
    hooks["on_train_start"] = lambda run: (heard.append(("on_train_start", ())), runs.append(run))
    return callback(**hooks), heard, runs


def pre_training(path, callbacks):
    sections = {"run": {"updates": 2, "dir": str(path / "run")}, "lr": {"warmup": 0}, "eval": {"every": 1}}
    trainer.train(load_config(write_tiny(path, **sections, checkpoint={"every": 1})), callbacks=callbacks)


def fine_tuning(path, callbacks, kind=SFT):
    more = {"batch": {"rows": 16, "updates": 2}, "eval": {"every": 1}, "checkpoint": {"every": 1}}
    post_train(load_config(write(path, kind, **more)), callbacks=callbacks)


def preferences(path, callbacks):
    fine_tuning(path, callbacks, DPO)


def policy(path, callbacks):
    sections = {"rollout": {"rollouts": 1, "epochs": 1}, "eval": {"every": 1}, "checkpoint": {"every": 1}}
    post_train(config(path, **sections), task=Evens(1, "+", 10), callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        pre_training,
        fine_tuning,
        preferences,
        policy,
    ],
    ids=["train", "sft", "dpo", "rl"],
)
def test_every_loop_calls_every_hook_and_gives_the_documented_run(loop, tmp_path):
    recording, heard, (runs) = recorder()
    seen = []

    def look(step, batch):
        (run,) = runs
        rows = {len(leaf) for leaf in batch.values()}
        seen.append((step, run.done, rows))
        run.sync()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state.params))
        assert isinstance(run.state, TrainState) and int(run.state.step) == run.done

    loop(tmp_path, [recording, callback(before_update=look)])
    (run,) = runs
    names = [name for name, _ in heard]
    start = ["on_train_start"] + ([] if loop is pre_training else ["on_eval", "on_save"])
    step = ["on_step_start", "before_update", "on_step_end", "on_eval", "on_save"]
    assert names == [*start, *step, *step, "on_train_end"]
    assert [number for number, _, _ in seen] == [1, 2] and [done for _, done, _ in seen] == [0, 1]
    assert all(len(rows) == 1 for _, _, rows in seen)
    for name in (*ATTRIBUTES, "say", "sync"):
        assert hasattr(run, name), name
    assert (run.done, run.total) == (2, 2) and run.directory.metrics.is_file()
    assert run.config.run.dir == str(run.directory.path) and run.mesh.size >= 1
    assert run.metrics and all(isinstance(value, float) for value in run.metrics.values())
    arguments = {name: arguments for name, arguments in heard}
    assert arguments["on_train_end"][0] == 2 and arguments["on_save"][1].is_dir()
    assert arguments["on_step_end"][1]["grad_norm"] >= 0


@pytest.mark.slow
def test_the_first_record_is_kept_by_a_run_that_resumes_before_its_first_update(tmp_path):
    from jaxfb.metrics import read_jsonl

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    settings = load_config(write(tmp_path, SFT, batch={"rows": 16, "updates": 1}))
    with pytest.raises(Stop):
        post_train(settings, callbacks=[callback(on_step_start=stop)])
    result = post_train(settings, resume=True)
    steps = [record["step"] for record in read_jsonl(result.directory / "metrics.jsonl")]
    assert steps[0] == 0 and result.updates == 1
