"""Outputs of several calls that are added up: every number is that of one call over the rows of all."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb import BatchPlan, Last, LossOutput, Max, Min, Sum, get_forward_backward_func
from jaxfb.output import check_complete

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(6, 3)), "mask": np.array([1.0, 0.5, 2.0, 0.0, 1.5, 0.25])}
PARAMS = {"w": RNG.normal(size=3)}
SHARE = 1.5 / 5.25
"""What the first two rows count of all."""


def of_one_ratio(params, mb, rng):
    """Two terms whose weights have one ratio, and a metric of every kind."""
    hidden, count = jnp.tanh(mb["x"] @ params["w"]), mb["mask"].sum()
    terms = {
        "a": Sum((hidden * mb["mask"]).sum(), count),
        "b": Sum((hidden**2 * mb["mask"]).sum(), count / 3),
    }
    metrics = {
        "sum": Sum(hidden.sum(), count),
        "max": Max(hidden.max()),
        "min": Min(hidden.min()),
        "last": Last(hidden[-1]),
    }
    return LossOutput(terms, metrics, {"row": hidden})


def undivided(params, mb, rng):
    return LossOutput({"c": Sum(((mb["x"] @ params["w"]) ** 3).sum())})


def call(loss, start=0, stop=6, normalize="global"):
    rows = {name: leaf[start:stop] for name, leaf in BATCH.items()}
    plan = BatchPlan(rows=stop - start, rows_per_microbatch=1)
    return get_forward_backward_func(normalize=normalize)(loss, PARAMS, rows, plan)


@pytest.fixture(scope="module")
def calls():
    """Returns the outputs of two rows, of the four others, and of all."""
    return call(of_one_ratio, 0, 2), call(of_one_ratio, 2), call(of_one_ratio)


def scaled(out, factor, **origin):
    """The output with gradients that are multiplied by a factor, and with that in its origin."""
    grads = jax.tree.map(lambda leaf: leaf * factor, out.grads)
    return replace(out, grads=grads, origin=replace(out.origin, **origin))


def assert_same(got, wanted, *but):
    for name in {"loss", "terms", "grads", "metrics", "per_microbatch", "outputs"} - {*but}:
        chex.assert_trees_all_close(getattr(got, name), getattr(wanted, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("one", "other"), [(None, None), (4.0, 16.0), (None, 0.5), (8.0, None)])
def test_each_call_is_weighted_by_what_it_counted_and_the_sum_has_the_scale_of_the_first(calls, one, other):
    a, b, whole = calls
    both = sum([scaled(a, one or 1, grad_scale=one), scaled(b, other or 1, grad_scale=other)])
    assert (both.origin.rows, both.origin.grad_scale) == (6, one)
    assert_same(scaled(both, 1 / (one or 1)), whole)


def test_calls_that_were_divided_by_the_weights_of_all_are_added_as_they_are(calls):
    a, b, whole = calls
    weights = {name: term.weight for name, term in whole.terms.items()}
    one, other = scaled(a, SHARE, weights=weights), scaled(b, 1 - SHARE, weights=weights)
    assert_same(one + other, whole)
    check_complete(one + other)
    for incomplete in (one, one + other + one):
        with pytest.raises(ValueError, match="they were divided by weights="):
            check_complete(incomplete)
    others = {}, weights | {"a": 2 * weights["a"]}, weights | {"c": 1.0}
    for different in (b, *(scaled(b, 1, weights=other) for other in others)):
        for pair in ((one, different), (different, one)):
            with pytest.raises(ValueError, match="must be divided by the same weights"):
                pair[0] + pair[1]
    with pytest.raises(ValueError, match="count 0 for term 'c'"):
        check_complete(scaled(whole, 1, weights=weights | {"c": 1.0}))


def test_short_gradients_are_weighted_before_they_are_rounded(calls):
    short = [replace(out, grads={"w": out.grads["w"].astype(jnp.bfloat16)}) for out in calls[:2]]
    wide = [np.asarray(out.grads["w"], np.float32) for out in short]
    got = (short[0] + short[1]).grads["w"]
    wanted = wide[0] * np.float32(SHARE) + wide[1] * np.float32(1 - SHARE)
    np.testing.assert_array_equal(got, jnp.asarray(wanted, jnp.bfloat16))


def test_a_mean_of_means_is_one_over_all_microbatches():
    a, b, whole = (call(of_one_ratio, *bounds, normalize="microbatch") for bounds in ((0, 2), (2,), ()))
    assert_same(a + b, whole)


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
def test_terms_without_a_weight_are_summed_up(normalize):
    a, b, whole = (call(undivided, *bounds, normalize=normalize) for bounds in ((0, 2), (2,), ()))
    both = a + b
    assert_same(both, whole, "terms")
    np.testing.assert_allclose(both.terms["c"].value, whole.terms["c"].value, rtol=1e-12)


def test_gradients_of_different_losses_are_added_and_then_have_no_weight(calls):
    whole, other = calls[-1], call(undivided)
    both = whole + other
    np.testing.assert_allclose(both.loss, whole.loss + other.loss, rtol=1e-12)
    np.testing.assert_allclose(both.grads["w"], whole.grads["w"] + other.grads["w"], rtol=1e-12)
    assert both.outputs is None and set(both.metrics) == {"sum", "max", "min", "last"}
    assert both.origin.undivided == ("c",) and both.origin.groups == (("a", "b"), ("c",))
    for one, two in ((both, whole), (whole, both), (both, both)):
        with pytest.raises(ValueError, match="are not divided by one weight each; pass weights="):
            one + two
    of_means = (scaled(out, 1, normalize="microbatch") for out in (both, whole))
    with pytest.raises(ValueError, match="are not divided by one weight each; make one call of all rows"):
        sum(of_means)


def test_calls_whose_weights_have_different_ratios_are_refused(calls):
    a, b, _ = calls
    term = b.terms["b"]
    other = replace(b, terms=b.terms | {"b": Sum(term.total, term.weight * (1 + 1e-9))})
    with pytest.raises(ValueError, match="the weights are 1.5 and 3.75 for 'a'"):
        a + other
    with pytest.raises(ValueError, match=r"inside jax\.jit their weights cannot be compared"):
        jax.jit(lambda a, b: a + b)(a, b)
    for pair in ((scaled(a, 1, whole_batch=True), b), (a, scaled(b, 1, whole_batch=True))):
        with pytest.raises(ValueError, match="statistics of the whole global batch"):
            pair[0] + pair[1]


def test_a_term_that_has_a_weight_in_one_call_alone_is_refused(calls):
    out = calls[-1]
    for pair in ((out, scaled(out, 1, undivided=("a", "b"))), (scaled(out, 1, undivided=("a", "b")), out)):
        with pytest.raises(ValueError, match="weights of term '[ab]' agree, got (none and one|one and none)"):
            pair[0] + pair[1]


def test_outputs_of_rows_of_another_shape_are_left_out(calls):
    a, b, _ = calls
    wider = replace(b, outputs={"row": b.outputs["row"][:, None]})
    assert (a + wider).outputs is None
    two = [
        replace(out, outputs={"more": more["row"], **out.outputs})
        for out, more in ((a, a.outputs), (b, wider.outputs))
    ]
    assert (two[0] + two[1]).outputs is None
    assert (a + replace(b, outputs=None)).outputs is None
