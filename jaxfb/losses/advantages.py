"""Advantages: how much better each sampled token was than expected. On the host, over a whole rollout, once.

Between the rollout and the batch plan: whatever needs a group's or the batch's statistics is computed here, before
rows are split into updates and microbatches, so that no loss ever has to look across rows.

Shapes: R = rows of the rollout, S = tokens of a row; everything numpy, float64. A mask is not 0 where a token counts;
what masked slots hold is inert. Outcome estimators take one reward a row and return advantages [R, S], 0 where the
mask is 0. Other shapes are refused. A reward that is not finite makes the advantages of its group so, is warned of, and
the update that reads them is skipped by the step.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from jaxfb.losses.settings import check_not_negative, check_share
from jaxfb.refusal import Refused


class Estimate(NamedTuple):
    """advantages: float64[R, S], 0 where the mask is 0.  returns: float64[R, S], what a critic is to predict."""

    advantages: np.ndarray
    returns: np.ndarray


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whitened: bool = True,
) -> Estimate:
    """Computes generalized advantage estimation (arXiv:1506.02438) over the counted tokens of each row.

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  returns = A + V

    where t+1 is the next counted token: tokens that the policy did not write (tool results) are skipped.

    Args:
      rewards, values, mask: float[R, S].
      gamma, lam: discount and trace decay, per counted token, in [0, 1].
      whitened: advantages get mean 0 and variance 1 over the whole rollout.
    Raises:
      ValueError: gamma or lam is out of range, a shape is another, or there is nothing to whiten.
    """
    check_share("gae", 1.0, gamma=gamma, lam=lam)
    counted = _counted(mask)
    _check_like(counted, rewards=rewards, values=values)
    rewards, values = (np.where(counted, x, 0.0).astype(np.float64) for x in (rewards, values))
    _warn_of_nonfinite(rewards=rewards, values=values)
    advantages = np.zeros_like(values)
    next_value, following = np.zeros(len(values)), np.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        here = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        advantages[:, t] = np.where(counted[:, t], here, 0)
        next_value = np.where(counted[:, t], values[:, t], next_value)
        following = np.where(counted[:, t], here, following)
    returns = np.where(counted, advantages + values, 0.0)
    return Estimate(whiten(advantages, mask) if whitened else advantages, returns)


def grpo(
    rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray, *, by_std: bool = True, eps: float = 1e-6
) -> np.ndarray:
    """Computes (reward - mean of the group) / (std of the group + eps) on every counted token (arXiv:2402.03300).

    by_std=False leaves the division out: Dr. GRPO (arXiv:2503.20783). The std is that of a sample (ddof 1). A
    group of one row keeps its reward: it has no mean to compare with.

    Args:
      rewards: float[R], of each row's whole response.
      groups: [R], which prompt each row answers; any values.
      mask: float[R, S].
    """
    check_not_negative("grpo", 1e-6, eps=eps)
    centred, stds = np.array(rewards, np.float64), np.ones(np.shape(rewards))
    for members in group_members(groups, centred):
        if len(members) > 1:
            above = _above_first(centred[members])
            centred[members], stds[members] = above - above.mean(), above.std(ddof=1)
    return on_tokens(centred / (stds + eps) if by_std else centred, mask)


def dr_grpo(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes reward - mean of the group (arXiv:2503.20783). With aggregation "seq-mean-token-sum-norm" it is the
    paper's.
    """
    return grpo(rewards, groups, mask, by_std=False)


def rloo(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes reward - mean of the others in the group (arXiv:2402.14740); a group of one row keeps its reward."""
    better = np.array(rewards, np.float64)
    for members in group_members(groups, better):
        if len(members) > 1:
            above = _above_first(better[members])
            better[members] = above - (above.sum() - above) / (len(members) - 1)
    return on_tokens(better, mask)


def opo(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes reward - mean of the group weighted by response lengths, the baseline of least variance
    (arXiv:2505.23585).
    """
    lengths, better = _counted(mask).sum(1), np.array(rewards, np.float64)
    for members in group_members(groups, better):
        if len(members) > 1 and lengths[members].sum():
            above = _above_first(better[members])
            better[members] = above - np.average(above, weights=lengths[members])
    return on_tokens(better, mask)


def gpg(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes (R / rows with a reward that is not 0) * (reward - mean of the group) (arXiv:2504.02546)."""
    rewards = np.asarray(rewards, np.float64)
    return len(rewards) / max(np.count_nonzero(rewards), 1) * dr_grpo(rewards, groups, mask)


def remax(rewards: np.ndarray, baselines: np.ndarray, mask: np.ndarray) -> Estimate:
    """Subtracts the reward of the greedy response to a prompt from the rewards from each token on (arXiv:2310.10505).

    Args:
      rewards: float[R, S] per token, or float[R] per row.
      baselines: float[R].
    """
    rewards = np.asarray(rewards, np.float64)
    _warn_of_nonfinite(baselines=baselines)
    if rewards.ndim == 1:
        _warn_of_nonfinite(rewards=rewards)
        returns = on_tokens(rewards, mask)
    else:
        returns = gae(rewards, np.zeros_like(rewards), mask, lam=1.0, whitened=False).returns
    return Estimate(returns - on_tokens(baselines, mask), returns)


def reinforce_plus_plus(rewards: np.ndarray, mask: np.ndarray, *, gamma: float = 1.0) -> Estimate:
    """Computes discounted rewards from each token on, whitened over the whole rollout (arXiv:2501.03262).

    Tokens that do not count are skipped: they neither discount nor end a return.

    Args:
      rewards: float[R, S] per token, such as the outcome on the last one and a KL penalty on all.
      gamma: discount per counted token, in [0, 1].
    Raises:
      ValueError: gamma is out of range, or there is nothing to whiten.
    """
    check_share("reinforce_plus_plus", 1.0, gamma=gamma)
    return gae(rewards, np.zeros(np.shape(rewards)), mask, gamma=gamma, lam=1.0)


def reinforce_plus_plus_baseline(rewards: np.ndarray, groups: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Computes reward - mean of the group, whitened over the tokens of the whole rollout (arXiv:2501.03262)."""
    return whiten(dr_grpo(rewards, groups, mask), mask)


def whiten(values: np.ndarray, mask: np.ndarray, *, shift_mean: bool = True) -> np.ndarray:
    """Computes (values - mean) / sqrt(variance + 1e-8) over the counted slots of all rows together; 0 elsewhere.

    The variance is that of a sample (ddof 1). shift_mean=False adds the mean again.

    Raises:
      ValueError: fewer than two slots count, or the shapes differ.
    """
    counted = np.asarray(mask) != 0
    _check_like(counted, values=values)
    if counted.sum() < 2:
        raise Refused(
            f"[advantages] whitening needs 2 counted tokens, got {counted.sum()}: check the response mask, or "
            "leave the advantages as they are"
        )
    picked = np.asarray(values, np.float64)[counted]
    above = _above_first(picked)
    scaled = (above - above.mean()) / np.sqrt(above.var(ddof=1) + 1e-8)
    out = np.zeros(counted.shape)
    out[counted] = scaled if shift_mean else scaled + picked.mean()
    return out


def group_members(groups: np.ndarray, rewards: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of each group.

    Raises:
      ValueError: rewards are not one a row, or not as many as groups.
    """
    groups = np.asarray(groups)
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise Refused(
            f"[advantages] an outcome estimator needs one reward and one group a row, got rewards {rewards.shape} and "
            f"groups {groups.shape}; sum rewards per token over each row first"
        )
    _warn_of_nonfinite(rewards=rewards)
    _, inverse = np.unique(groups, return_inverse=True)
    return [np.flatnonzero(inverse == group) for group in range(inverse.max(initial=-1) + 1)]


def on_tokens(per_row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Puts float[R] on every counted token: float64[R, S]."""
    counted = _counted(mask)
    if np.shape(per_row) != counted.shape[:1]:
        raise Refused(
            f"[advantages] one number a row is needed, got the shape {np.shape(per_row)} for a mask {counted.shape}; "
            "sum rewards per token over each row first"
        )
    return np.where(counted, np.asarray(per_row, np.float64)[:, None], 0.0)


def _counted(mask: np.ndarray) -> np.ndarray:
    """Returns bool[R, S], where the mask counts a token."""
    if np.ndim(mask) != 2:
        raise Refused(
            f"[advantages] mask must be [rows, tokens], got the shape {np.shape(mask)}; for one row use mask[None]"
        )
    return np.asarray(mask) != 0


def _check_like(mask: np.ndarray, **arrays: np.ndarray) -> None:
    """Refuses arrays that have not the mask's shape, which would be broadcast to it or fail far from here."""
    for name, array in arrays.items():
        if np.shape(array) != mask.shape:
            raise Refused(
                f"[advantages] {name} must have the mask's shape {mask.shape}, got {np.shape(array)}; give a number "
                "at each token"
            )


def _above_first(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers less the first of them.

    Equal ones then differ from their mean by exactly 0; the mean of large ones is rounded to another number.
    """
    return numbers - numbers[0]


def _warn_of_nonfinite(**arrays: np.ndarray) -> None:
    """Warns of the first number of each array [R] or [R, S] that is not finite, since what is made of it is not."""
    for name, array in arrays.items():
        finite = np.isfinite(np.asarray(array, np.float64))
        if not finite.all():
            place = tuple(np.argwhere(~finite)[0].tolist())
            warnings.warn(
                f"[advantages] {name}{list(place)}={np.asarray(array)[place]} is not finite, so the advantages made of "
                "it are not, and a train step skips the updates that read them; use 0.0 for a response that cannot be "
                "judged",
                stacklevel=4,
            )
