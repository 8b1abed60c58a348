"""Post-training on the engine of pre-training: fine-tuning, preferences, and policies that learn from rewards.

    sample -> reward -> log-probs (old, reference, values) -> advantages -> [rows -> one update] x K x epochs

`policy.py` is that line; `supervised.py` and `preference.py` are the other two kinds of run; `training/loop.py` is
what all share, pretraining too. Every pass is the same `forward_backward` call, with the plan of its purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from jaxfb.config.post_training import COMMANDS, DPOConfig, RLConfig, SFTConfig
from jaxfb.refusal import Refused, instance, shown

if TYPE_CHECKING:
    from jaxfb.callbacks import Callback
    from jaxfb.rl.tasks import Task
    from jaxfb.training.job.hosts import Hosts
    from jaxfb.training.session import Result
    from jaxfb.training.work import Work


def post_train(
    config: SFTConfig | DPOConfig | RLConfig,
    *,
    task: Task | None = None,
    resume: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Runs a post-training config, as `load_config` returns it; everything it makes is in `config.run.dir`.

    Args:
      config: an `SFTConfig`, `DPOConfig` or `RLConfig`.
      task: for an `RLConfig`, used instead of the config's task: an object with the members of `jaxfb.rl.tasks.Task`.
      resume: continue from the newest checkpoint there, bit for bit as if it had never stopped; without one, start.
      fresh: move a run that lies there aside and start over.
      allow_changes: resume with a config that gives what is saved another meaning; without it that is refused.
      callbacks: called at every hook, after the trainer's own logging.
    Raises:
      ValueError: an impossible size, a missing file, a saved run in run.dir, a checkpoint that does not fit.
      LostProcess: another process of the job is gone; what was saved is whole.
      NonFiniteAbort: too many updates in a row were not finite, or the state is not; of it nothing is saved.
      CannotWrite: the disk is full or not writable; the message names the update that is saved.
    """
    from jaxfb.training import loop

    kinds = (SFTConfig, DPOConfig, RLConfig)
    instance("config", config, kinds, "a config of post-training, such as jaxfb.load_config('sft')")
    if task is not None and not isinstance(config, RLConfig):
        raise Refused(
            f"[task] task={shown(task)} would not be read: this is a config of `jaxfb {COMMANDS[type(config)]}`, which "
            "learns from a file; leave task out, or give a config of `jaxfb rl`"
        )
    make = partial(make_work, task=task, fresh=fresh)
    return loop.run(make, config, loop.Start(resume, fresh, allow_changes), callbacks)


def make_work(
    config: SFTConfig | DPOConfig | RLConfig, hosts: Hosts, task: Task | None = None, fresh: bool = False
) -> Work:
    """Returns everything that a post-training config describes, ready to run; nothing is compiled.

    fresh: the run begins, so that what is saved in its directory does not count.
    """
    if isinstance(config, SFTConfig):
        from jaxfb.rl.supervised import make_supervised_work

        return make_supervised_work(config, fresh)
    if isinstance(config, DPOConfig):
        from jaxfb.rl.preference import make_preference_work

        return make_preference_work(config, fresh)
    from jaxfb.rl.policy import make_policy_work

    return make_policy_work(config, task, hosts.first, fresh)
