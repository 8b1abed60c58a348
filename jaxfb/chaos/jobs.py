"""The small jobs that `jaxfb chaos` tries: a run as one process, the same as two, and rollouts with updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Job:
    """A command that trains a small model in seconds.

    config, overrides: a starter config, and what makes it small. processes: joined over loopback; more than one run on
    the CPU, wherever `jaxfb chaos` itself runs.
    times: how often each of `fault_points.POINTS` is reached.
    """

    name: str
    command: str
    config: str
    overrides: tuple[str, ...]
    times: Mapping[str, int]
    processes: int = 1


_SMALL = tuple(
    """model.num_layers=2 model.hidden_size=32 model.num_heads=2 model.num_kv_heads=1
    data.tokenizer=bytes data.sequence_length=32 data.max_bytes=60000 data.held_out_fraction=0.1
    batch.rows=16 batch.num_microbatches=2 run.updates=12 lr.warmup=2 lr.final=0 log.every=1
    eval.every=4 eval.batches=1 eval.rows=8 eval.rows_per_microbatch=2 eval.prompt= checkpoint.every=4
    optimizer.name=adamw optimizer.learning_rate=0.01""".split()
)
_ROLLOUTS = tuple(
    """model.hidden_size=16 model.num_heads=2 task.digits=1 task.held_out=6 warm_start.updates=4 warm_start.rows=8
    rollout.prompts=8 rollout.samples_per_prompt=2 rollout.rows_per_update=8 rollout.rollouts=4
    rollout.max_new_tokens=3 policy.kl_coef=0.1 policy.entropy_coef=0.01 plans.train.rows_per_microbatch=8
    plans.logprob_old.rows_per_microbatch=16 plans.logprob_ref.rows_per_microbatch=16 lr.name=constant lr.warmup=0
    optimizer.learning_rate=0.01 log.every=1 eval.every=4 checkpoint.every=3 mesh.data=1""".split()
)
_ONCE = dict.fromkeys(("start", "start.ready", "restore", "restore.done", "end"), 1)
_UPDATE, _SAVE = ("read", "update", "logged"), ("save", "save.writing", "save.renaming", "save.done")
_EVAL, _LOCAL, _ROLLOUT = ("eval", "eval.done"), ("local", "local.done"), ("rollout", "rollout.done")


def _times(groups: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    return _ONCE | {point: number for points, number in groups.items() for point in points}


TRAIN = Job("train", "train", "quickstart", _SMALL, _times({_UPDATE: 12, _SAVE: 3, _EVAL: 3, _LOCAL: 9}))
RL = Job(
    "rl", "rl", "grpo_arithmetic", _ROLLOUTS, _times({_ROLLOUT: 4, _UPDATE: 8, _SAVE: 4, _EVAL: 3, _LOCAL: 5})
)
TWO = replace(TRAIN, name="two", overrides=(*_SMALL, "hosts.lost_after=10"), processes=2)
JOBS = (TRAIN, RL, TWO)
