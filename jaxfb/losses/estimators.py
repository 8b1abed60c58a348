"""Advantage estimators by name: which numbers of a rollout each of them reads. Plain numpy.

The estimators themselves are in `advantages.py`; `rl/experience.py` computes what the chosen one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfb.losses import advantages
from jaxfb.losses.advantages import Estimate
from jaxfb.parts import ESTIMATORS
from jaxfb.refusal import Refused, function, shown

INPUTS = ("rewards", "token_rewards", "groups", "mask", "values", "baselines")


@dataclass(frozen=True)
class Estimator:
    """A way to make advantages of a rollout of R rows with S tokens.

    function: of `reads`, in that order, and of the options by keyword; returns advantages float[R, S], or an `Estimate`
      with the returns that a critic is to predict.
    reads:    of INPUTS: rewards [R], token_rewards [R, S], groups [R] (which prompt each row answers), mask [R, S],
      values [R, S] of a critic, baselines [R] (the reward of the greedy response to the same prompt).
    options:  keys of a config's section `advantage` -> arguments of the function.
    """

    function: Callable[..., np.ndarray | Estimate]
    reads: tuple[str, ...] = ("rewards", "groups", "mask")
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        for name in self.reads:
            if name not in INPUTS:
                raise Refused(f"[advantage] reads={shown(name)} must be one of {', '.join(INPUTS)}")

    @property
    def needs_critic(self) -> bool:
        """Returns whether values of a critic are read."""
        return "values" in self.reads

    @property
    def by_group(self) -> bool:
        """Returns whether the samples of one prompt are compared."""
        return "groups" in self.reads

    def __call__(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns {"advantages": float[R, S]}, with "returns" beside it where the estimator has them."""
        given = {argument: options[key] for key, argument in self.options.items()}
        found = self.function(*(inputs[name] for name in self.reads), **given)
        return found._asdict() if isinstance(found, Estimate) else {"advantages": found}


def estimator_of(name: str) -> Estimator:
    """Returns the estimator of a name; a function that is no `Estimator` reads rewards, groups and mask."""
    found = ESTIMATORS[name]
    if isinstance(found, Estimator):
        return found
    return Estimator(function("name", found, "(rewards, groups, mask) -> advantages", who="[advantage]"))


grpo = Estimator(advantages.grpo)
dr_grpo = Estimator(advantages.dr_grpo)
rloo = Estimator(advantages.rloo)
opo = Estimator(advantages.opo)
gpg = Estimator(advantages.gpg)
reinforce_plus_plus_baseline = Estimator(advantages.reinforce_plus_plus_baseline)
remax = Estimator(advantages.remax, ("token_rewards", "baselines", "mask"))
reinforce_plus_plus = Estimator(advantages.reinforce_plus_plus, ("token_rewards", "mask"), {"gamma": "gamma"})
gae = Estimator(
    advantages.gae,
    ("token_rewards", "values", "mask"),
    {"gamma": "gamma", "lam": "lam", "whiten": "whitened"},
)
