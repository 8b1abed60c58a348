"""Losses and their settings with one wrong argument: refused in a sentence that names it, when they are made."""

import math

import pytest
from legal import boolean, either, functions, maybe, nothing, numbers, one_of
from wrong import Call, pool

import jaxfb
from jaxfb.losses.aggregation import AGGREGATIONS
from jaxfb.losses.kl import KL_ESTIMATORS
from jaxfb.losses.surrogates import SURROGATES, make_surrogate
from jaxfb.parts import PREFERENCES

MODEL = jaxfb.Pipelined(*[lambda *_: None] * 3, unembed=lambda *_: None)  # never run
POSITIVE, SHARE = numbers(above=0), numbers(0, 1)
AGGREGATION = {"aggregation": one_of(AGGREGATIONS), "scale": maybe(POSITIVE)}


def settings(name):
    """The rules of one surrogate's settings: numbers are positive, or None where that is the default."""
    from dataclasses import fields

    rules = {}
    for field in fields(SURROGATES[name]):
        rule = numbers(0) if (name, field.name) == ("dro", "beta") else numbers(above=0)
        if field.name in ("clip_high", "low", "high", "truncation", "dual_clip") or name == "geo_mean":
            rule = either(rule, one_of([math.inf]))
        rules[field.name] = maybe(rule) if field.default is None or field.name == "dual_clip" else rule
    return rules | ({"divergence": one_of(("tv", "kl"))} if "divergence" in rules else {})


CALLS = [
    Call(
        "PolicyLoss",
        jaxfb.PolicyLoss,
        dict,
        {
            "surrogate": functions,
            "aggregation": maybe(one_of(AGGREGATIONS)),
            "scale": maybe(POSITIVE),
            "kl_coef": numbers(0),
            "kl_estimator": one_of(KL_ESTIMATORS),
            "entropy_coef": numbers(),
            "on_policy": boolean,
        },
    ),
    Call(
        "ValueLoss",
        jaxfb.ValueLoss,
        dict,
        {"clip": maybe(either(POSITIVE, one_of([math.inf]))), "coef": numbers(0), **AGGREGATION},
    ),
    Call(
        "PreferenceLoss",
        jaxfb.PreferenceLoss,
        dict,
        {
            "kind": one_of(PREFERENCES),
            "beta": POSITIVE,
            "label_smoothing": numbers(0, below=0.5),
            "reference_free": boolean,
            "length_normalized": boolean,
            "margin": numbers(),
            "sft_coef": numbers(0),
        },
    ),
    Call("SFTLoss", jaxfb.SFTLoss, dict, AGGREGATION),
    Call(
        "DistillationLoss",
        jaxfb.DistillationLoss,
        dict,
        {"direction": one_of(("forward", "reverse")), "rest": boolean, "coef": numbers(0), **AGGREGATION},
    ),
    Call(
        "policy_loss_fn",
        jaxfb.policy_loss_fn,
        lambda: dict(model=MODEL, loss=jaxfb.PolicyLoss()),
        {"model": nothing, "loss": functions, "temperature": POSITIVE},
    ),
    Call(
        "log_prob_fn",
        jaxfb.log_prob_fn,
        lambda: dict(model=MODEL),
        {"model": nothing, "temperature": POSITIVE},
    ),
    Call(
        "value_loss_fn",
        jaxfb.value_loss_fn,
        lambda: dict(model=MODEL, loss=jaxfb.ValueLoss()),
        {"model": nothing, "loss": functions},
    ),
    Call("value_fn", jaxfb.value_fn, lambda: dict(model=MODEL), {"model": nothing}),
    Call(
        "distillation_loss_fn",
        jaxfb.distillation_loss_fn,
        lambda: dict(model=MODEL),
        {"model": nothing, "loss": maybe(nothing), "temperature": POSITIVE},
    ),
    Call(
        "make_surrogate",
        make_surrogate,
        lambda: dict(name="ppo"),
        {"name": one_of(SURROGATES)},
        {"name": "policy loss"},
    ),
    *(Call(name, SURROGATES[name], dict, settings(name)) for name in SURROGATES),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    call()
    assert not call.failures(pool(seed=8))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()
