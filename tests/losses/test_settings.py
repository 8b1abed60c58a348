"""A coefficient that is NaN, a text, a bool or out of range is refused by its name when the loss is made."""

import math

import numpy as np
import pytest

from jaxfb.losses import advantages
from jaxfb.losses.aggregation import check_aggregation
from jaxfb.losses.distillation import DistillationLoss
from jaxfb.losses.heads import _check_ranges, log_prob_fn, policy_loss_fn
from jaxfb.losses.importance import rollout_weights
from jaxfb.losses.kl import AdaptiveKL, kl_in_reward
from jaxfb.losses.language_model import check_regularizers
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.preference import PreferenceLoss
from jaxfb.losses.surrogates import SURROGATES, make_surrogate
from jaxfb.losses.token_log_probs import log_probs_of_logits
from jaxfb.losses.value import ValueLoss
from jaxfb.types import Pipelined

ONE = np.ones((2, 2))
NOTHING = lambda *_: None  # noqa: E731
MODEL = Pipelined(NOTHING, NOTHING, NOTHING, unembed=NOTHING)  # never run


def norm(**scale):
    return PolicyLoss(aggregation="seq-mean-token-sum-norm", **scale)


def adaptive(**changes):
    return AdaptiveKL(**{"coefficient": 0.1, "target": 0.1, "horizon": 10, **changes})


def of_logits(temperature):
    return log_probs_of_logits(ONE, ONE[0].astype(int), temperature)


def regularized(**changes):
    return check_regularizers(**{"label_smoothing": 0, "z_loss": 0, "logit_softcap": None, **changes})


# (what is made of it, the setting's name, a legal value, values out of range beside those that are never legal)
SETTINGS = [
    (PolicyLoss, "kl_coef", 0.1, (-0.1,)),
    (PolicyLoss, "entropy_coef", -0.1, ()),
    (norm, "scale", 8, (0, -1.0)),
    (ValueLoss, "coef", 0.5, (-1,)),
    (ValueLoss, "clip", 0.5, (0,)),
    (PreferenceLoss, "beta", 0.1, (0, -1)),
    (PreferenceLoss, "label_smoothing", 0.1, (0.5, -0.1)),
    (PreferenceLoss, "margin", -0.5, ()),
    (PreferenceLoss, "sft_coef", 0.2, (-1,)),
    (DistillationLoss, "coef", 0.2, (-1,)),
    (adaptive, "coefficient", 0.1, (-1,)),
    (adaptive, "target", 0.1, (0,)),
    (adaptive, "horizon", 10, (0,)),
    (lambda coefficient: kl_in_reward(ONE, ONE, ONE, ONE, coefficient), "coefficient", 0.1, (-1,)),
    (lambda **s: rollout_weights(ONE, ONE, ONE, **s), "upper", 2.0, (1, 0.5)),
    (lambda **s: rollout_weights(ONE, ONE, ONE, **s), "lower", 0.5, (1, -0.5)),
    (regularized, "label_smoothing", 0.1, (1, -0.1)),
    (regularized, "z_loss", 1e-4, (-1e-4,)),
    (regularized, "logit_softcap", 30, (0, math.inf)),
    (of_logits, "temperature", 0.7, (0, -1, math.inf)),
    (lambda temperature: log_prob_fn(MODEL, temperature=temperature), "temperature", 0.7, (0, math.inf)),
    (lambda temperature: policy_loss_fn(MODEL, PolicyLoss(), temperature=temperature), "temperature", 0.7, (0,)),
    (lambda **s: advantages.gae(ONE, ONE, ONE, **s), "gamma", 0.9, (-0.1, 1.1)),
    (lambda **s: advantages.gae(ONE, ONE, ONE, **s), "lam", 0.9, (-0.1, 1.1)),
    (lambda gamma: advantages.reinforce_plus_plus(ONE, ONE, gamma=gamma), "gamma", 0.9, (-0.1, 1.1)),
    (lambda eps: advantages.grpo(ONE[0], ONE[0], ONE, eps=eps), "eps", 1e-4, (-1,)),
]  # fmt: skip
SURROGATE_SETTINGS = [
    ("ppo", "clip_low", 0.2, (0, 1.1, -1)),
    ("ppo", "clip_high", 0.2, (0, -1)),
    ("ppo", "dual_clip", 3.0, (1, 0.5)),
    ("gspo", "clip_low", 1e-3, (0, 1.1)),
    ("gspo", "clip_high", 1e-3, (0,)),
    ("geo_mean", "clip_low", 1.5, (0, -1)),
    ("geo_mean", "clip_high", 0.4, (0, -1)),
    ("cispo", "clip_low", 1.0, (0, 1.1)),
    ("cispo", "clip_high", 0.28, (0,)),
    ("sapo", "tau_pos", 1.0, (0, -1)),
    ("sapo", "tau_neg", 1.0, (0, -1)),
    ("dppo", "low", 0.1, (0, -1)),
    ("dppo", "high", 0.1, (0, -1)),
    ("dppo", "truncation", 20, (0, -1)),
    ("dro", "beta", 0.1, (-1,)),
]


ALL = SETTINGS + [
    (lambda surrogate=surrogate, **s: make_surrogate(surrogate, **s), name, legal, out)
    for surrogate, name, legal, out in SURROGATE_SETTINGS
]
NAMES = [f"{number}-{name}" for number, (_, name, _, _) in enumerate(ALL)]


@pytest.mark.parametrize("make, name, legal, out_of_range", ALL, ids=NAMES)
def test_what_is_no_number_or_out_of_range_is_refused_by_name(make, name, legal, out_of_range):
    make(**{name: legal})
    make(**{name: np.float32(legal)})
    for value in (math.nan, np.float64("nan"), "0.1", True, [0.1], *out_of_range):
        with pytest.raises(ValueError, match=rf"\[\w+\] {name}=.* must be .*; use ") as refusal:
            make(**{name: value})
        assert "\n" not in str(refusal.value)


def test_every_number_of_every_surrogate_is_tried():
    from dataclasses import fields

    tried = {(surrogate, name) for surrogate, name, _, _ in SURROGATE_SETTINGS}
    numbers = {
        (surrogate, field.name)
        for surrogate, cls in SURROGATES.items()
        if surrogate != "gpg"  # the same class as reinforce
        for field in fields(cls)
        if field.type != "str"
    }
    assert tried == numbers


def test_a_kl_that_is_not_finite_leaves_the_coefficient_as_it_is():
    controller = AdaptiveKL(0.1, 0.1, 100)
    assert controller.updated(math.nan, 10) == controller
    assert controller.updated(math.inf, 10) == controller
    assert controller.updated(1.0, 10).coefficient > 0.1


def test_a_scale_is_asked_for():
    with pytest.raises(ValueError, match="needs a positive constant scale, got None"):
        check_aggregation("seq-mean-token-sum-norm", None)


def test_a_surrogate_must_be_a_function():
    for wrong in (None, "ppo", SURROGATES["ppo"]):
        with pytest.raises(ValueError, match=r"\[loss\] surrogate must be a function .* such as PPOClip\(\)"):
            PolicyLoss(wrong)


@pytest.mark.parametrize("ranges", [5, (5,), ((5, 6, 7),), ((5,),)])
def test_ids_that_are_never_drawn_are_ranges_of_two_ends(ranges):
    with pytest.raises(ValueError, match="absent_ids must be a tuple of ranges"):
        _check_ranges(ranges)
