"""Checks what a resumed run may change: keys that would not fit existing rows or saved arrays are refused.

Part of the loop, when a checkpoint is read. Which rows form an update is compared elsewhere (`explain_difference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfb.config.post_training import RLConfig
from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.refusal import Refused
from jaxfb.training.persistence.changes import ABSENT, FLAG, Change, changes_between

# What a rollout's rows were made by, and what its updates compare them with.
OF_A_ROLLOUT = (
    "task.",
    "rollout.",
    "advantage.",
    "policy.",
    "reward.",
    "critic.clip",
    "start.stop_tokens",
)
LENGTH = "rollout.rollouts"


def refuse_other_rollout(saved: Mapping[str, Any], config: RLConfig, update: int, per_rollout: int) -> None:
    """Refuses to continue with rows of a rollout under settings that did not make them.

    saved: the config in the checkpoint. update: how many updates are done. per_rollout: updates of one rollout.

    Raises:
      ValueError: names the keys, and the updates at which they may change.
    """
    changes = changes_between(saved, config)
    lasting = [change for change in changes if _decides_what_is_saved(*change)]
    if lasting:
        raise Refused(
            f"[run] a resumed run cannot change {_words(lasting)}: the arrays that are saved with it depend on that; "
            "keep the saved value, or begin a new run with start.run=the saved run's directory"
        )
    passed = update % per_rollout
    changed = [one for one in changes if one[0].startswith(OF_A_ROLLOUT) and one[0] != LENGTH]
    if passed and changed:
        raise Refused(
            f"[run] update {update} lies in the middle of a rollout, whose rows were made by the saved settings: "
            f"it cannot continue with {_words(changed)}; keep the saved values until update "
            f"{update - passed + per_rollout}, where the next rollout begins"
        )


def refuse_ids_without_probability(
    targets: np.ndarray, mask: np.ndarray, absent_ids: IdRanges, update: int
) -> None:
    """Refuses the rest of a rollout whose responses contain ids that are never sampled.

    Earlier versions sampled every id of the model's vocabulary. Such an id has no probability now, and the log-probs
    that are saved with it were computed with one, so that no ratio of the rollout would be that of the policy.

    targets, mask: i32 and a number [R, S], of the rollout. update: how many updates are done.

    Raises:
      ValueError: a response contains such an id.
    """
    ids = targets[mask != 0]
    if found := [int(i) for first, end in absent_ids for i in ids[(ids >= first) & (ids < end)]]:
        raise Refused(
            f"[run] update {update} lies in the middle of a rollout in which an earlier version of jaxfb sampled ids "
            f"that the tokenizer lacks, such as {min(found)} ({len(found)} of {ids.size}); they have no probability "
            "now, so its updates cannot go on; begin a new run with start.run=the saved run's directory, or use "
            f"{FLAG} to continue anyway"
        )


def _decides_what_is_saved(key: str, old: Any, new: Any) -> bool:
    """Returns whether the change adds or removes arrays, or gives them another shape."""
    if key in ("policy.kl_coef", "reward.kl_coef"):
        return bool(old) != bool(new)
    if key == "critic.learning_rate":
        return ABSENT in (old, new)
    if key == "rollout.importance_cap":
        return (old is None) != (new is None)
    return key == "rollout.max_new_tokens"


def _words(changes: list[Change]) -> str:
    return ", ".join(f"{key}={new!r} (saved: {old!r})" for key, old, new in changes)
