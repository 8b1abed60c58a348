"""Several calls, one update: outputs that are added are those of one call over all rows, whatever the mesh."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from trees import TREES, arrays, batch_of

import jaxfb
from jaxfb import BatchPlan, LossOutput, Sum, get_forward_backward_func, make_mesh, make_train_step
from jaxfb.update.train_state import Limits

ROWS = 8
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, 8)),
    "mask": (RNG.random((ROWS, 8)) > 0.4).astype(float),
    "score": RNG.random(ROWS),
}
PARAMS = {"w": RNG.normal(size=8), "v": np.float64(0.3)}


def dropped(x, keys):
    return (
        x if keys is None else jnp.where(jax.vmap(lambda k: jax.random.bernoulli(k, 0.8, (8,)))(keys), x, 0)
    )


def tokens(params, mb, keys):
    hidden = jnp.tanh(dropped(mb["x"], keys).astype(params["w"].dtype) * params["w"] + params["v"])
    return LossOutput(
        {"tokens": Sum(jnp.where(mb["mask"] > 0, hidden**2, 0).sum(), mb["mask"].sum())},
        {
            "largest": jaxfb.Max(hidden.max()),
            "mean": Sum(hidden.sum(), hidden.size),
            "last": jaxfb.Last(hidden[-1, -1]),
        },
        {"row": hidden.sum(1)},
    )


def score(params, mb, keys):
    return LossOutput({"score": Sum((mb["score"] * params["v"] ** 2).sum(), mb["score"].sum())})


def both(params, mb, keys):
    out = tokens(params, mb, keys)
    return replace(out, terms=out.terms | score(params, mb, keys).terms)


def undivided(params, mb, keys):
    return Sum((mb["x"] * params["w"]).sum() * params["v"])


def rows_of(batch, *bounds):
    pairs = zip(bounds, bounds[1:], strict=False)
    return [{name: leaf[start:stop] for name, leaf in batch.items()} for start, stop in pairs]


def replicas(sizes):
    return sizes.get("data", 1) * sizes.get("fsdp", 1)


def step_of(sizes, model=both, rows=ROWS, rows_per_microbatch=1, optimizer=None, **options):
    plan = BatchPlan(rows=rows, rows_per_microbatch=rows_per_microbatch, data_parallel=replicas(sizes))
    return make_train_step(model, optimizer or optax.adam(0.1), make_mesh(**sizes), plan, **options)


def in_parts(step, state, batch, bounds, weighted=True, rows_per_microbatch=1):
    """The sum of the calls over those rows."""
    plans = [
        BatchPlan(rows=b - a, rows_per_microbatch=rows_per_microbatch, data_parallel=step.plan.data_parallel)
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    calls = [
        (part, {"plan": plan, "first_row": first})
        for part, plan, first in zip(rows_of(batch, *bounds), plans, bounds, strict=False)
    ]
    given = {}
    if weighted:
        counts = [step.weights(state, part, **options) for part, options in calls]
        given = {"weights": jax.tree.map(lambda *each: sum(each), *counts)}
    return sum(step.gradients(state, part, **options, **given) for part, options in calls)


def assert_same(got, wanted, tolerance=1e-12):
    """Of two outputs or states: all that is a number."""
    drop = lambda tree: [  # noqa: E731
        leaf
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    ]
    chex.assert_trees_all_close(drop(got), drop(wanted), rtol=tolerance, atol=tolerance)


def check_law(step, params, batch, bounds, **options):
    state = step.init(params, 7)
    whole, parts = step.gradients(state, batch), in_parts(step, state, batch, bounds, **options)
    assert parts.origin.rows == whole.origin.rows
    for name in ("loss", "grads", "terms", "metrics", "per_microbatch", "outputs"):
        assert_same(getattr(parts, name), getattr(whole, name))
    after, metrics = step.apply(state, parts)
    expected = step(step.init(params, 7), batch)
    assert_same((after, metrics), expected)


# one call


@pytest.mark.parametrize(
    ("sizes", "options", "dtype"),
    [
        ({}, {"max_grad_norm": 0.1}, "float32"),
        pytest.param(
            {"data": 2, "fsdp": 2},
            {"optimizer_sharding": "data", "normalize": "microbatch"},
            "bfloat16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {},
            {"loss_scale": jaxfb.DynamicLossScale(initial=256.0), "compute_dtype": "float16"},
            "float64",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_one_call_and_apply_are_the_step_bit_for_bit(sizes, options, dtype):
    step = step_of(sizes, **options)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS)
    one, other = step.init(params, 1), step.init(params, 1)
    for _ in range(2):
        one, of_one = step(one, BATCH)
        other, of_other = step.apply(other, step.gradients(other, BATCH))
        for got, wanted in zip(*map(jax.tree.leaves, ((other, of_other), (one, of_one))), strict=True):
            if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(got, wanted)
    assert int(one.step) == 2


TIMED = [
    ({}, {"max_grad_norm": 0.1}),
    pytest.param(
        {"data": 2, "fsdp": 2},
        {"optimizer_sharding": "data", "normalize": "microbatch"},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("sizes", "options"), TIMED, ids=["one device", "sharded"])
def test_a_timed_update_is_that_of_the_step(sizes, options):
    check_timed(sizes, both, PARAMS, BATCH, 0, **options)


@pytest.mark.slow
def test_a_timed_update_of_layers_in_a_pipelines_order_is_that_of_the_step():
    """To rounding: the older emitter of the tests rounds these two programs otherwise."""
    check_timed({"pipe": 2}, toy.model, toy.params(layers=4), toy.batch(rows=ROWS), 1e-12, num_chunks=2)


def check_timed(sizes, model, params, batch, tolerance, **options):
    """With a short last batch, and limits that skip the second update."""
    step = step_of(sizes, model, optimizer=jaxfb.make_optimizer("adamw", learning_rate=0.1), **options)
    one, other = step.init(params, 1), step.init(params, 1)
    for rows, limits in ((None, None), (None, Limits(0.0, 0.0)), (6, Limits(1e9, 1e9))):
        one, of_one = step(one, batch, rows, limits)
        other, of_other, seconds = step.timed(other, batch, rows, limits)
        assert set(seconds) == {"forward_backward", "optimizer"} and min(seconds.values()) > 0
        assert_same((other, of_other), (one, of_one), tolerance)
    assert int(other.step) == 2


def compare_a_pipelines_call_and_apply_with_the_step():
    step = step_of({"pipe": 2}, toy.model, max_grad_norm=1.0)
    params = toy.params(layers=2, dtype=np.float32)
    state, metrics = step(step.init(params), toy.batch(rows=ROWS))
    fresh = step.init(params)
    after, of_after = step.apply(fresh, step.gradients(fresh, toy.batch(rows=ROWS)))
    chex.assert_trees_all_equal(
        (after.params, after.opt_state, of_after), (state.params, state.opt_state, metrics)
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_pipelines_call_and_apply_are_the_step_bit_for_bit():
    """In a process without the older emitter of the tests, which rounds these two programs otherwise."""
    here = Path(__file__).parent
    tests = here.parent
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "PYTHONPATH": f"{tests.parent}:{tests}:{here}",
        "JAX_ENABLE_X64": "1",
    }
    compare = "import test_split_step as t; t.compare_a_pipelines_call_and_apply_with_the_step()"
    done = subprocess.run([sys.executable, "-c", compare], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# several calls


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        pytest.param({}, {"normalize": "microbatch"}, marks=pytest.mark.slow),
        pytest.param({"data": 2}, {"normalize": "none"}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "fsdp": 2},
            {"optimizer_sharding": "data", "max_grad_norm": 0.1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_calls_over_parts_add_up_to_the_call_over_all_rows(sizes, options):
    """Two terms of different weights, a ragged mask and dropout."""
    weighted = options.get("normalize", "global") == "global"
    check_law(step_of(sizes, **options), PARAMS, BATCH, (0, 4, 8), weighted=weighted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pipe": 2}, {"schedule": "1f1b"}),
        ({"pipe": 2, "data": 2}, {"schedule": "zero_bubble", "optimizer_sharding": "data"}),
        ({"context": 2}, {"fsdp_gather": "layer"}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the loss function does not communicate")
def test_calls_over_parts_add_up_on_every_kind_of_mesh(sizes, options):
    if "context" in sizes:
        return check_law(step_of(sizes, **options), PARAMS, BATCH, (0, 2, 8))
    return check_law(
        step_of(sizes, toy.model, **options), toy.params(layers=2), toy.batch(rows=ROWS), (0, 4, 8)
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", [tokens, undivided])
def test_one_weight_or_none_needs_no_weights_beforehand(loss):
    check_law(
        step_of({}, loss, rows_per_microbatch=2),
        PARAMS,
        BATCH,
        (0, 2, 6, 8),
        weighted=False,
        rows_per_microbatch=2,
    )


@pytest.mark.slow
def test_terms_whose_weights_have_one_ratio_need_none_either():
    def twice(params, mb, keys):
        out = tokens(params, mb, keys)
        return LossOutput(
            out.terms | {"half": Sum(out.terms["tokens"].total * params["v"], mb["mask"].sum() / 2)}
        )

    check_law(step_of({}, twice), PARAMS, BATCH, (0, 4, 8), weighted=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_trees_of_every_kind(name):
    make, loss = TREES[name]
    params, batch = make(*arrays(np.float64)), batch_of()
    check_law(step_of({}, loss, rows=4), params, batch, (0, 2, 4), weighted=False)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02)])
def test_the_law_in_fewer_bits(dtype, tolerance):
    step = step_of({}, tokens)
    state = step.init(jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS), 7)
    whole, parts = step.gradients(state, BATCH), in_parts(step, state, BATCH, (0, 2, 8), weighted=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(parts.grads)} == {np.dtype("float32")}
    chex.assert_trees_all_close(parts.grads, whole.grads, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_calls_of_different_losses_add_up_to_the_sum_of_both():
    step = step_of({})
    state = step.init(PARAMS, 7)
    g = step.gradients(state, BATCH, model=tokens) + step.gradients(state, BATCH, model=score)
    whole = step.gradients(state, BATCH)
    assert_same((g.loss, g.grads, g.terms, g.metrics), (whole.loss, whole.grads, whole.terms, whole.metrics))
    assert g.outputs is None
    first, second = rows_of(BATCH, 0, 4, 8)
    half = {"plan": BatchPlan(rows=4, rows_per_microbatch=1)}
    parts = step.gradients(state, first, model=tokens, **half)
    parts = parts + step.gradients(state, second, model=tokens, first_row=4, **half)
    assert_same((parts + step.gradients(state, BATCH, model=score)).grads, whole.grads)


@pytest.mark.slow
def test_gradients_of_other_loss_scales_are_brought_to_one():
    step = step_of({}, tokens)
    state, plan = step.init(PARAMS), BatchPlan(rows=4, rows_per_microbatch=1)
    first, second = rows_of(BATCH, 0, 4, 8)
    fb = step.forward_backward
    wanted = fb(tokens, PARAMS, first, plan) + fb(tokens, PARAMS, second, plan)
    scaled = fb(tokens, PARAMS, first, plan, grad_scale=4.0) + fb(
        tokens, PARAMS, second, plan, grad_scale=16.0
    )
    assert_same(step.apply(state, scaled)[0].params, step.apply(step.init(PARAMS), wanted)[0].params)


@pytest.mark.slow
def test_a_call_that_is_not_finite_skips_the_update_and_one_that_counts_nothing_adds_nothing():
    step = step_of({}, tokens)
    state, half = step.init(PARAMS), {"plan": BatchPlan(rows=4, rows_per_microbatch=1)}
    first, second = rows_of(BATCH, 0, 4, 8)
    good = step.gradients(state, first, **half)
    empty = step.gradients(state, second | {"mask": 0 * second["mask"]}, **half)
    assert_same((good + empty).grads, good.grads)
    bad = step.gradients(state, second | {"x": second["x"] * np.inf}, **half)
    after, metrics = step.apply(state, good + bad)
    assert metrics.skipped and metrics.nonfinite_leaves(PARAMS)
    assert_same(after.params, PARAMS)
    after, metrics = step.apply(after, empty + empty)
    assert (int(after.nonfinite_updates), int(after.zero_weight_updates), int(after.samples)) == (1, 1, 0)


@pytest.mark.slow
def test_outputs_are_added_under_jit_where_that_is_decided_without_values():
    fb, plan = get_forward_backward_func(), BatchPlan(rows=ROWS, rows_per_microbatch=1)
    out = {loss: fb(loss, PARAMS, BATCH, plan) for loss in (tokens, both)}
    added = jax.jit(lambda a, b: a + b)
    assert_same(added(out[tokens], out[tokens]).grads, out[tokens].grads)
    with pytest.raises(ValueError, match=r"inside jax\.jit their weights cannot be compared"):
        added(out[both], out[both])


# refusals


@pytest.mark.slow
def test_what_cannot_be_added_exactly_is_refused():
    step = step_of({})
    state, half = step.init(PARAMS), {"plan": BatchPlan(rows=4, rows_per_microbatch=1)}
    first, second = rows_of(BATCH, 0, 4, 8)
    a, b = step.gradients(state, first, **half), step.gradients(state, second, **half)
    with pytest.raises(ValueError, match=r"the weights are .* for 'score', .* for 'tokens'; pass weights="):
        a + b
    of_tokens = step.gradients(state, first, model=tokens, **half)
    with pytest.raises(ValueError, match="are not divided by one weight each"):
        of_tokens + b
    mixed = of_tokens + step.gradients(state, first, model=score, **half)
    with pytest.raises(ValueError, match="first add the calls that have the same single term"):
        mixed + of_tokens
    plain = get_forward_backward_func(normalize="none")(both, PARAMS, BATCH, step.plan)
    with pytest.raises(ValueError, match="their normalize agree, got global and none"):
        a + plain
    with pytest.raises(ValueError, match="their gradients agree"):
        a + step.forward_backward(both, PARAMS, first, half["plan"], forward_only=True)
    with pytest.raises(TypeError):
        a + 1


@pytest.mark.slow
def test_weights_of_another_update_are_refused():
    step = step_of({})
    state, half = step.init(PARAMS), {"plan": BatchPlan(rows=4, rows_per_microbatch=1)}
    first, second = rows_of(BATCH, 0, 4, 8)
    count = step.weights(state, first, **half)
    alone = step.gradients(state, first, weights=count, **half)
    twice = step.gradients(state, second, weights=jax.tree.map(lambda w: 2 * w, count), **half)
    with pytest.raises(ValueError, match="must be divided by the same weights"):
        alone + twice
    with pytest.raises(ValueError, match=r"count .* for term 'score', but they were divided by weights="):
        step.apply(state, twice)
    with pytest.raises(
        ValueError, match=r"weights must have the terms that are divided, \['score', 'tokens'\]"
    ):
        step.gradients(state, first, weights={"tokens": 3.0}, **half)
    for weights in ([1.0], {"tokens": np.ones(2)}, {"tokens": None}, {"tokens": "3"}):
        with pytest.raises(ValueError, match="weights must be a dict from names of terms to numbers"):
            step.gradients(state, first, weights=weights, **half)


def test_what_cannot_be_applied_is_refused():
    step = step_of({}, tokens)
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match="gradients must be what step.gradients"):
        step.apply(state, PARAMS)
    forward = step.forward_backward(tokens, PARAMS, BATCH, step.plan, forward_only=True)
    with pytest.raises(ValueError, match="comes from a call with forward_only=True"):
        step.apply(state, forward)
    g = step.gradients(state, BATCH)
    with pytest.raises(ValueError, match=r"gradients\['w'\] must be float64\[8\]"):
        step.apply(state, replace(g, grads=g.grads | {"w": jnp.zeros(3)}))
    with pytest.raises(ValueError, match="gradients must be a tree like params"):
        step.apply(state, replace(g, grads={"w": g.grads["w"]}))
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match="first_row must be"):
            step.gradients(state, BATCH, first_row=wrong)


# the function between gradients and clip


@pytest.mark.slow
def test_gradients_are_changed_before_they_are_measured_and_clipped():
    def frozen(grads, state):
        return grads | {"v": jnp.where(state.step < 1, 0, 1) * grads["v"], "w": 3 * grads["w"]}

    options = {"max_grad_norm": 0.01, "count_zeros": True}
    changed = step_of({}, tokens, optimizer=optax.sgd(1.0), change_gradients=frozen, **options)
    plain = step_of({}, tokens, optimizer=optax.sgd(1.0), **options)
    state, metrics = changed(changed.init(PARAMS), BATCH)
    grads = plain.gradients(plain.init(PARAMS), BATCH).grads
    np.testing.assert_allclose(metrics.grad_norm, 3 * np.linalg.norm(grads["w"]), rtol=1e-12)
    np.testing.assert_allclose(metrics.clipped_grad_norm, 0.01, rtol=1e-12)
    assert (float(metrics.num_zeros), float(state.params["v"])) == (1, PARAMS["v"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda grads, state: {"w": grads["w"]}, "must be a tree like params"),
        (
            lambda grads, state: jax.tree.map(jnp.atleast_2d, grads),
            r"\['v'\] must be float64\[\], got float64\[1, 1\]",
        ),
        (
            lambda grads, state: jax.tree.map(jnp.float32, grads),
            r"\['v'\] must be float64\[\], got float32\[\]",
        ),
        (3, "change_gradients must be a function"),
    ],
)
def test_changed_gradients_of_another_form_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        step_of({}, tokens, change_gradients=change)(step_of({}, tokens).init(PARAMS), BATCH)


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves into runs/
    text = (Path(__file__).parents[2] / "docs" / "split_step.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S)), {})
