"""`--smoke`: the overrides that turn any config into a few updates that leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

from jaxfb.config.post_training import RLConfig
from jaxfb.config.root import Config

UPDATES = 4
DIRECTORY = "jaxfb-smoke-"
"""What the name of the directory begins with in which a smoke run makes its own, and which is removed at its end."""
_EVERY_KIND = (
    "lr.warmup=0",
    "lr.total=null",
    "lr.name=constant",  # a tail of 4,000 updates, as wsd may have, is longer than the run
    "lr.options={}",
    "eval.every=null",
    "checkpoint.every=null",
    "log.every=1",
    "log.writers=[]",
)
_TRAIN = (
    f"run.updates={UPDATES}",
    "run.samples=null",
    "run.tokens=null",
    "run.epochs=null",
    "batch.ramp_up=null",
    "eval.batches=1",
)
_FINE_TUNING = (f"batch.updates={UPDATES}", "batch.epochs=null")
_POLICY = ("rollout.rollouts=1", "warm_start.updates=0", "task.held_out=16")


def smoke_overrides(kind: type) -> list[str]:
    """Returns the overrides of a few updates without evaluation or checkpoints, for a config of that class."""
    return [*_EVERY_KIND, *{Config: _TRAIN, RLConfig: _POLICY}.get(kind, _FINE_TUNING)]


def is_kept(run_dir: str | os.PathLike[str]) -> bool:
    """Returns whether the directory of a run stays after its end, which that of a smoke run does not."""
    return not Path(run_dir).parent.name.startswith(DIRECTORY)
