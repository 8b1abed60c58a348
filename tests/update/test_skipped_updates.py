"""An update is applied wholly or not at all: what skips it, what is counted and named, and that every bit stays."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import on_the_host
from marks import some_slow
from trees import CASES, ROWS, TREES, arrays, batch_of, dict_loss, params_of

import jaxfb
from jaxfb import BatchPlan, Sum, make_mesh, make_train_step
from jaxfb.update.train_state import Limits

PLAN = BatchPlan(rows=ROWS, num_microbatches=2)


def bits(tree):
    """Every leaf's dtype and bytes, on the host, since the state is donated."""
    return [(str(leaf.dtype), leaf.tobytes()) for leaf in on_the_host(tree)]


# Whatever the optimizer, the dtype and the tree


@pytest.mark.filterwarnings("ignore:the optimizer accumulates")
@pytest.mark.parametrize("name", some_slow(CASES, fast=("adamw", "sgd")))
def test_a_skipped_update_leaves_every_bit_and_the_next_is_what_it_would_have_been(name):
    optimizer, dtype, tree = CASES[name]
    make, loss = TREES[tree]
    step = make_train_step(loss, optimizer, None, PLAN, max_grad_norm=1.0, dropout=False)
    ends = []
    for bad in (True, False):
        state, _ = step(step.init(make(*arrays(dtype))), batch_of(0))
        before = bits((state.params, state.opt_state))
        if bad:
            state, metrics = step(state, batch_of(1, under_root=0.0))
            assert bool(metrics.skipped) and np.isfinite(metrics.loss) and not np.isfinite(metrics.grad_norm)
            assert bits((state.params, state.opt_state)) == before
        state, metrics = step(state, batch_of(2))
        assert not bool(metrics.skipped) and metrics.update_norm > 0
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {dtype}
        ends.append(bits((state.params, state.opt_state)))
        assert ends[-1] != before
    assert ends[0] == ends[1]


@pytest.mark.parametrize("limits", [(0.0, np.inf), (np.inf, 0.0)])
def test_an_update_beyond_its_limits_leaves_every_bit_of_the_whole_state(limits):
    scale = jaxfb.optim.DynamicLossScale(initial=4.0, growth_interval=1)
    optimizer, key = optax.adam(0.1), lambda state: replace(state, rng=jax.random.key_data(state.rng))
    step = make_train_step(dict_loss, optimizer, None, PLAN, loss_scale=scale)
    state = step.init(params_of())
    before = bits(key(state))
    state, metrics = step(state, batch_of(), limits=Limits(*limits))
    assert bool(metrics.skipped) and bool(metrics.spike) and not bool(metrics.nonfinite.any)
    assert bits(key(state)) == before and metrics.update_norm == 0
    again, within = step(jax.tree.map(jnp.copy, state), batch_of(), limits=Limits(np.inf, np.inf))
    state, free = step(state, batch_of())
    assert not bool(within.skipped) and not bool(within.spike) and free.spike is None
    assert bits(key(again)) == bits(key(state)) != before and int(state.step) == 1


def test_what_is_not_finite_counts_as_such_beyond_limits_too(sgd):
    state, metrics = sgd(sgd.init(params_of()), batch_of(added=np.inf), limits=Limits(0.0, 0.0))
    assert not bool(metrics.spike) and int(state.nonfinite_updates) == 1


@pytest.mark.parametrize("limits", [1.0, (1.0,), (1.0, np.nan), ("1", 2.0), [1.0, 2.0]])
def test_limits_that_are_none_are_refused(sgd, limits):
    with pytest.raises(ValueError, match="limits must be a Limits"):
        sgd(sgd.init(params_of()), batch_of(), limits=limits)


# What skips an update, and the names it gets


@pytest.fixture(scope="module")
def sgd():
    return make_train_step(dict_loss, optax.sgd(0.1, momentum=0.9), None, PLAN, dropout=False)


def attempt(step, params, batch, change=lambda state: state):
    """(state before, state after, metrics) of one update from fresh parameters."""
    state = change(step.init(params))
    before = jax.tree.map(jnp.copy, state)
    return before, *step(state, batch)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_skips_the_update_though_the_gradient_is(sgd, bad):
    before, after, metrics = attempt(sgd, params_of(), batch_of(added=bad))
    assert np.isfinite(metrics.grad_norm) and not np.any(metrics.nonfinite.gradients)
    assert metrics.nonfinite_causes(after.params) == {"loss": []}
    assert_skipped(before, after, metrics)


def test_a_gradient_that_is_not_finite_is_named_by_its_leaf(sgd):
    before, after, metrics = attempt(sgd, params_of(), batch_of(under_root=0.0))
    assert np.isfinite(metrics.loss)
    assert metrics.nonfinite_causes(after.params) == {"gradients": ["['vector']"]}
    assert_skipped(before, after, metrics)


def test_a_gradient_whose_norm_overflows_is_named_by_its_leaf(sgd):
    before, after, metrics = attempt(sgd, params_of(), batch_of(slope=1e30))
    assert np.isfinite(metrics.loss) and metrics.grad_norm == np.inf
    assert metrics.nonfinite_causes(after.params) == {"gradients": ["['vector']"]}
    assert_skipped(before, after, metrics)


def test_a_moment_that_is_not_finite_skips_every_update_and_its_leaf_is_named(sgd):
    def poisoned(state):
        trace = state.opt_state[0].trace
        trace = trace | {"matrix": trace["matrix"].at[1, 2].set(jnp.nan)}
        return replace(state, opt_state=(state.opt_state[0]._replace(trace=trace), state.opt_state[1]))

    before, after, metrics = attempt(sgd, params_of(), batch_of(), poisoned)
    assert np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    assert metrics.nonfinite_causes(after.params) == {"updates": ["['matrix']"]}
    assert_skipped(before, after, metrics)


def test_a_parameter_that_is_not_finite_skips_every_update_though_the_loss_does_not_read_it(sgd):
    params = params_of() | {"unread": np.array([0.0, np.nan], np.float32)}
    before, after, metrics = attempt(sgd, params, batch_of())
    assert np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    assert metrics.nonfinite_causes(after.params) == {"parameters": ["['unread']"]}
    assert_skipped(before, after, metrics)


def test_a_finite_update_that_would_make_a_parameter_overflow_is_skipped():
    """65504 is the largest float16; with 100 added it is infinite."""

    def loss(params, microbatch, rng):
        return Sum(-100 * params["far"].astype(jnp.float32).sum(), microbatch["weight"].sum() / ROWS)

    plan = BatchPlan(rows=ROWS, num_microbatches=1)
    step = make_train_step(loss, optax.sgd(1.0), None, plan, dropout=False)
    params = {"far": np.array([1.0, 65504.0], np.float16)}
    before, after, metrics = attempt(step, params, batch_of())
    assert metrics.nonfinite_causes(after.params) == {"parameters": ["['far']"]}
    assert_skipped(before, after, metrics)


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", marks=pytest.mark.slow),
        "float64",
    ],
)
def test_a_learning_rate_that_is_not_finite_skips_the_update(dtype):
    step = make_train_step(dict_loss, optax.adam(lambda count: jnp.nan), None, PLAN, dropout=False)
    before, after, metrics = attempt(step, params_of(dtype), batch_of())
    assert metrics.nonfinite_causes(after.params) == {"updates": ["['matrix']", "['vector']"]}
    assert_skipped(before, after, metrics)


def assert_skipped(before, after, metrics):
    assert bool(metrics.skipped) and metrics.update_norm == 0
    assert bits((before.params, before.opt_state)) == bits((after.params, after.opt_state))
    assert (int(after.step), int(after.samples), int(after.attempts)) == (0, 0, 1)
    assert int(after.nonfinite_updates) == int(metrics.nonfinite_updates) == 1
    assert int(after.zero_weight_updates) == 0


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
def test_rows_that_count_nothing_skip_the_update_in_every_normalization(normalize):
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=0.1, weight_decay=0.1)
    step = make_train_step(masked_loss, optimizer, None, PLAN, normalize=normalize, dropout=False)
    before, after, metrics = attempt(step, params_of(), batch_of(weight=0.0))
    assert bool(metrics.skipped) and metrics.nonfinite_causes(after.params) == {}
    assert bits((before.params, before.opt_state)) == bits((after.params, after.opt_state))
    counters = (after.step, after.samples, after.nonfinite_updates, after.zero_weight_updates, after.attempts)
    assert [int(count) for count in counters] == [0, 0, 0, 1, 1]
    after, metrics = step(after, batch_of())
    assert not bool(metrics.skipped)


def masked_loss(params, microbatch, rng):
    counted = microbatch["weight"] > 0
    per_row = jnp.where(counted, (microbatch["x"] @ params["matrix"] @ params["vector"]) ** 2, 0)
    return Sum(per_row.sum(), microbatch["weight"].sum())


@pytest.mark.slow
def test_zeros_of_the_gradient_are_counted_where_that_is_asked_for():
    def loss(params, microbatch, rng):
        kept = jnp.array([1.0, 0.0, 1.0, 1.0]) * params["vector"]
        return Sum((microbatch["x"][:, :1] * kept).sum(), microbatch["weight"].sum())

    counts = []
    for mesh in (make_mesh(), make_mesh(data=2)):
        plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=mesh.shape["data"])
        step = make_train_step(loss, optax.sgd(0.1), mesh, plan, count_zeros=True, max_grad_norm=1.0)
        counts.append(float(step(step.init(params_of()), batch_of())[1].num_zeros))
    assert counts == [17, 17]  # the matrix, which is unread, and one number of the vector
    step = make_train_step(loss, optax.sgd(0.1), None, PLAN)
    assert step(step.init(params_of()), batch_of())[1].num_zeros is None
