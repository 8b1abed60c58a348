"""Advantages: how much better each sampled token was than expected. On the host, over a whole rollout, once.

Between the rollout and the batch plan: whatever needs a group's or the batch's statistics is computed here, before
rows are split into updates and microbatches, so no loss ever has to look across rows.

Shapes: R = rows of the rollout, S = tokens of a row. numpy, float64; a mask is nonzero where a token counts.
"""

from __future__ import annotations

import numpy as np


def grpo(
    rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray, *, by_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """(reward - mean of the group) / (std of the group + eps) on every counted token (arXiv:2402.03300).

    by_std=False leaves the division out: Dr. GRPO (arXiv:2503.20783). The std is that of a sample (ddof 1). A
    group of one row keeps its reward: it has no mean to compare with.

    Args:
      rewards: float[R], of each row's whole response.
      groups: [R], which prompt each row answers; any values.
      mask: float[R, S].
    Returns:
      float64[R, S], 0 where the mask is 0.
    """
    rewards = np.asarray(rewards, np.float64)
    means, stds = np.zeros_like(rewards), np.ones_like(rewards)
    for members in group_members(groups):
        if len(members) > 1:
            means[members], stds[members] = rewards[members].mean(), rewards[members].std(ddof=1)
    centred = rewards - means
    return on_tokens(centred / (stds + eps) if by_std else centred, mask)


def group_members(groups: np.ndarray) -> list[np.ndarray]:
    """The rows of each group."""
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    return [np.flatnonzero(inverse == group) for group in range(inverse.max(initial=-1) + 1)]


def on_tokens(per_row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float[R] put on every counted token: [R, S]."""
    return np.where(np.asarray(mask) != 0, np.asarray(per_row, np.float64)[:, None], 0.0)
