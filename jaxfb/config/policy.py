"""The sections that only `jaxfb rl` has: what is sampled, how it is rewarded, and what is learnt from it. Plain Python.

`post_training.py` puts them together.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxfb.config.checks import at_least_zero, expand_home, positive, seed_in_range
from jaxfb.config.sections import Number
from jaxfb.parts import ESTIMATORS, SURROGATES
from jaxfb.refusal import Refused, shown

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
LogProbs = Literal["recompute", "sampler"]
RewardKL = Literal["k1", "k2", "k3", "abs"]
PolicyKL = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
FROM_SAMPLER = "sampler"
MOST_DIGITS = 9
TEMPLATES = ("chatml", "plain", "none")


@dataclass(frozen=True)
class TaskConfig:
    """Problems with answers that can be checked, made on the spot.

    name:      "arithmetic"; a program may give a task of its own to `jaxfb.rl.post_train`.
    digits:    digits of each operand, at most. operations: "+", "-", "*", or several such as "+-".
    held_out:  problems that are never trained on, and that accuracy is measured on.
    seed:      seed of the problems.
    template:  how a prompt becomes a user's message: as for conversations, but null without a template of the run or of
               the tokenizer is "none", the prompt alone.
    """

    name: Literal["arithmetic"] = "arithmetic"
    digits: int = 2
    operations: str = "+"
    held_out: int = 512
    seed: int = 0
    template: str | None = None

    def __post_init__(self):
        known_template("task", self.template)
        expand_home(self, "template")
        positive("task", digits=self.digits, held_out=self.held_out)
        if self.digits > MOST_DIGITS:
            raise Refused(
                f"[task] digits={self.digits} must be at most {MOST_DIGITS}, so that problems have numbers of 64 bits; "
                f"use {MOST_DIGITS}",
                [{"digits": MOST_DIGITS}],
            )
        seed_in_range("task", self.seed)
        if not self.operations or set(self.operations) - set("+-*"):
            raise Refused(
                f'[task] operations={shown(self.operations)} must consist of "+", "-" and "*"; use "+"',
                [{"operations": "+"}],
            )
        each_once(self.operations)


def each_once(operations: str) -> None:
    """Refuses an operation that is given twice, since each of its problems would be both trained on and held out."""
    once = "".join(dict.fromkeys(operations))
    if once != operations:
        raise Refused(
            f"[task] operations={shown(operations)} gives an operation twice; use {once!r}",
            [{"operations": once}],
        )


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised fine-tuning before the first rollout, on the answers of part of the problems.

    learning_rate: the peak of its updates.
    updates: updates of the warm start; 0 leaves it out.
    rows: rows of an update.
    problems: how many different problems; null: all that train.
    """

    updates: int = 0
    rows: int = 128
    learning_rate: float = 3e-3
    problems: int | None = None

    def __post_init__(self):
        at_least_zero("warm_start", updates=self.updates)
        positive("warm_start", rows=self.rows, learning_rate=self.learning_rate, problems=self.problems)


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of sampling, and of how samples become updates. The number of prompts is set here and nowhere else.

    prompts:            prompts of one rollout (P).
    samples_per_prompt: responses to each prompt (n); a rollout has P n rows.
    rows_per_update:    rows of one update (G); a pass over the rollout is P n / G updates.
    epochs:             passes over one rollout.
    rollouts:           rollouts of the run.
    max_new_tokens:     the longest response, in tokens.
    temperature:        temperature of sampling; log-probs are computed at it too.
    top_k:              sample among the k likeliest tokens; null: among all.
    shuffle:            shuffle the rows before each pass; the order depends on seed, rollout and pass alone.
    log_probs:          where the log-probs of the sampling policy come from: "recompute", a training forward, or the
                        "sampler".
    importance_cap:     with "recompute", weigh tokens by min(p / p_sampler, cap), a cap above 1; null: not at all.
    """

    prompts: int
    samples_per_prompt: int
    rows_per_update: int
    rollouts: int
    max_new_tokens: int
    epochs: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    shuffle: bool = True
    log_probs: LogProbs = "recompute"
    importance_cap: float | None = None

    def __post_init__(self):
        positive("rollout", **numbers_of(self))
        if self.importance_cap is not None and self.log_probs == FROM_SAMPLER:
            raise Refused(
                f"[rollout] importance_cap={self.importance_cap} compares the sampler with recomputed log-probs; "
                "use log_probs=recompute, or no cap",
                [{"log_probs": "recompute"}, {"importance_cap": None}],
            )
        if self.importance_cap is not None and self.importance_cap <= 1:
            raise Refused(
                f"[rollout] importance_cap={self.importance_cap} must be above 1; use 2",
                [{"importance_cap": 2.0}],
            )


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of how rewards become advantages, once a rollout, before rows are split.

    name:    how advantages are estimated (docs/policy_losses.md); "gae" needs a critic.
    gamma:   discount (gae, reinforce_plus_plus). lam: trace decay of gae.
    whiten:  gae: mean 0, standard deviation 1 over all counted tokens.
    """

    name: Annotated[str, ESTIMATORS] = "grpo"
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True

    def __post_init__(self):
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise Refused(
                    f"[advantage] {name}={getattr(self, name)} must be in [0, 1]; use 1.0", [{name: 1.0}]
                )


@dataclass(frozen=True)
class PolicyConfig:
    """The objective: a surrogate by name with its options, how tokens are averaged, and the two side terms.

    surrogate:     the loss of one token (docs/policy_losses.md). options: the surrogate's settings, such as clip_low.
    aggregation:   how losses of tokens become one number; null: the surrogate's own way.
    scale:         divisor of "seq-mean-token-sum-norm".
    kl_coef:       coefficient of the KL to the reference as a term of the loss; 0: none.
    kl_estimator:  estimator of that KL at each token (docs/policy_losses.md).
    entropy_coef:  coefficient of the entropy bonus; below 0 it penalizes entropy, as in `PolicyLoss`.
    """

    surrogate: Annotated[str, SURROGATES] = "ppo"
    options: dict[str, Number] = field(default_factory=dict)
    aggregation: Aggregation | None = None
    scale: float | None = None
    kl_coef: float = 0.0
    kl_estimator: PolicyKL = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self):
        at_least_zero("policy", kl_coef=self.kl_coef)


@dataclass(frozen=True)
class RewardConfig:
    """The KL to the reference taken off the reward of each token.

    kl_estimator: estimator of the KL at each token (docs/policy_losses.md).
    kl_coef: coefficient of the KL in the reward; 0: none.
    target: KL in nats a token that the coefficient is steered to; null: the coefficient stays as it is.
    horizon: rows over which an error of 20 % changes kl_coef by a fifth; must be above a fifth of a rollout's rows.
    """

    kl_coef: float = 0.0
    kl_estimator: RewardKL = "k1"
    target: float | None = None
    horizon: float = 10_000

    def __post_init__(self):
        at_least_zero("reward", kl_coef=self.kl_coef)
        positive("reward", target=self.target, horizon=self.horizon)
        if self.target is not None and self.kl_coef == 0:
            raise Refused(
                f"[reward] target={self.target} steers kl_coef, which is 0 and stays 0; use reward.kl_coef=0.001 to "
                "start from, or reward.target=null",
                [{"kl_coef": 0.001}, {"target": None}],
            )


@dataclass(frozen=True)
class CriticConfig:
    """A second model that predicts the return at each token, for advantages by gae.

    Its updates are cut by `plans.critic`, its forward passes over a rollout by `plans.value`.

    learning_rate: learning rate of its updates.
    max_grad_norm: global norm to clip its gradients to; null does not clip.
    start: "policy" copies the policy's layers as they are at the start; "random" draws new ones.
    clip:  how far a prediction may move from that of the rollout; null: freely.
    """

    learning_rate: float = 1e-3
    start: Literal["policy", "random"] = "policy"
    clip: float | None = 0.5
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        positive("critic", learning_rate=self.learning_rate, clip=self.clip, max_grad_norm=self.max_grad_norm)


def known_template(section: str, template: str | None) -> None:
    """Refuses a name that is neither a template nor a file of one."""
    if template is None or template in TEMPLATES or template.endswith(".jinja"):
        return
    near = difflib.get_close_matches(template, TEMPLATES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use {section}.template=null for the tokenizer's own"
    use = near[0] if near else None
    raise Refused(
        f"[{section}] template={shown(template)} must be one of {', '.join(TEMPLATES)}, the path of a .jinja file, "
        f"or null; {hint}",
        [{"template": use}],
    )


def numbers_of(section) -> dict[str, float]:
    """Returns the section's numbers by name, bools left out."""
    return {k: v for k, v in vars(section).items() if isinstance(v, int | float) and not isinstance(v, bool)}
