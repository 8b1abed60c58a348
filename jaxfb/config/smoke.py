"""`--smoke`: the overrides that turn any config into a few updates that leave nothing behind."""

from __future__ import annotations

from jaxfb.config.post_training import RLConfig
from jaxfb.config.root import Config

UPDATES = 4
_EVERY_KIND = (
    "lr.warmup=0",
    "lr.total=null",
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
