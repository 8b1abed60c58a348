"""Computes advantages from rewards by the estimator that the config names, one of `losses.advantages`."""

from __future__ import annotations

import numpy as np

from jaxfb.config.policy import AdvantageConfig
from jaxfb.losses import advantages

BY_GROUP = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


def advantages_of(
    config: AdvantageConfig,
    token_rewards: np.ndarray,
    groups: np.ndarray,
    mask: np.ndarray,
    values: np.ndarray | None = None,
    baseline: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns {"advantages": float[R, S]}, with "returns" beside it where the estimator has them.

    token_rewards: float[R, S]. groups: i[R], the prompt of each row. values: float[R, S] of the critic (gae).
    baseline: float[R], reward of the greedy response (remax).
    """
    if config.name in BY_GROUP:
        return {"advantages": getattr(advantages, config.name)(token_rewards.sum(1), groups, mask)}
    if config.name == "remax":
        return advantages.remax(token_rewards, baseline, mask)._asdict()
    if config.name == "reinforce_plus_plus":
        return advantages.reinforce_plus_plus(token_rewards, mask, gamma=config.gamma)._asdict()
    how = {"gamma": config.gamma, "lam": config.lam, "whitened": config.whiten}
    return advantages.gae(token_rewards, values, mask, **how)._asdict()
