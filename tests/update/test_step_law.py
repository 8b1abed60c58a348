"""Any optimizer on any tree of any dtype: on replicas, its state cut over them, it does what plain optax does alone."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import on_the_host
from jax.sharding import PartitionSpec as P
from marks import some_slow
from trees import CASES, ROWS, TREES, WIDTH, arrays, batch_of, dict_loss, params_of

from jaxfb import BatchPlan, make_mesh, make_train_step

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}
PLAN = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=2)


def plain_optax(optimizer, loss, params, batches, more=("value", "samples")):
    """The updates of a whole batch on one device, one operation after the other; more: what the optimizer takes."""
    optimizer, opt_state = optax.with_extra_args_support(optimizer), optimizer.init(params)

    def whole(params, batch):
        term = loss(params, batch, None)
        return (term.total / term.weight).astype(jnp.float32)

    for batch in batches:
        value, grads = jax.value_and_grad(whole)(params, batch)
        given = {name: {"value": value, "samples": 0}[name] for name in more}
        updates, opt_state = optimizer.update(grads, opt_state, params, **given)
        params = optax.apply_updates(params, updates)
    return params, opt_state


@pytest.mark.filterwarnings("ignore:the optimizer accumulates")
@pytest.mark.parametrize("name", some_slow(CASES, fast=("adamw", "sgd")))
def test_updates_on_replicas_are_those_of_plain_optax(name):
    optimizer, dtype, tree = CASES[name]
    make, loss = TREES[tree]
    mesh, batches = make_mesh(data=2), [batch_of(seed) for seed in range(2)]
    step = make_train_step(loss, optimizer, mesh, PLAN, dropout=False, optimizer_sharding="data")
    state = step.init(make(*arrays(dtype)))
    for batch in batches:
        state, _ = step(state, batch)
    params, opt_state = plain_optax(optimizer, loss, jax.tree.map(jnp.array, make(*arrays(dtype))), batches)
    for ours, theirs in ((state.params, params), (state.opt_state, opt_state)):
        for got, wanted in zip(on_the_host(ours), on_the_host(theirs), strict=True):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            got, wanted = (np.asarray(one, np.float64) for one in (got, wanted))
            np.testing.assert_allclose(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


LIKE_PARAMS = [
    name for name in CASES if name not in ("adafactor", "muon", "MultiSteps", "multi_transform", "noisy")
]


@pytest.mark.parametrize("name", LIKE_PARAMS)
def test_whatever_of_the_state_is_like_a_parameter_lives_as_its_gradient(name):
    optimizer, dtype, tree = CASES[name]
    make, loss = TREES[tree]
    for sizes, options, of_matrix, of_moment in (
        ({"data": 2}, {"optimizer_sharding": "data"}, P(), P("data")),
        ({"fsdp": 2}, {}, P("fsdp"), P("fsdp")),
    ):
        step = make_train_step(loss, optimizer, make_mesh(**sizes), PLAN, **options)
        state = step.abstract_state(lambda key, make=make: make(*map(jnp.asarray, arrays(dtype))))
        matrices = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.shape == (WIDTH, WIDTH)]  # noqa: E731
        assert {leaf.sharding.spec for leaf in matrices(state.params)} == {of_matrix}
        assert {leaf.sharding.spec for leaf in matrices(state.opt_state)} == {of_moment}


_BY_VALUE = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(),
    lambda updates, state, params=None, *, value: (
        jax.tree.map(lambda u: u * value.astype(u.dtype), updates),
        state,
    ),
)


@pytest.mark.parametrize(
    "name", ["polyak_sgd", "reduce_on_plateau", "sam", "a chain with sam", "a chain that reads the loss"]
)
def test_an_optimizer_that_asks_for_the_loss_is_given_it(name):
    optimizer = {
        "polyak_sgd": optax.polyak_sgd(0.1),
        "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
        "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),  # takes another argument and no others
        # a chain takes every argument, and hands them on to members that do not
        "a chain with sam": optax.chain(optax.clip(1.0), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))),
        "a chain that reads the loss": optax.chain(optax.sgd(0.1), _BY_VALUE),
    }[name]
    batches = [batch_of(seed) for seed in range(3)]
    plan = BatchPlan(rows=ROWS, num_microbatches=2)
    step = make_train_step(dict_loss, optimizer, None, plan, dropout=False)
    state = step.init(params_of())
    for batch in batches:
        state, _ = step(state, batch)
    more = {
        "sam": (),
        "a chain with sam": (),
        "a chain that reads the loss": ("value",),
    }.get(name, ("value", "samples"))
    params, _ = plain_optax(optimizer, dict_loss, params_of(), batches, more)
    for got, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5)


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    step = make_train_step(
        dict_loss, optax.lbfgs(), None, BatchPlan(rows=ROWS, num_microbatches=2), dropout=False
    )
    with pytest.raises(ValueError, match=r"needs arguments beside .*value_fn.*lbfgs\(linesearch=None\)"):
        step(step.init(params_of()), batch_of(0))


def test_an_optimizer_whose_members_disagree_about_its_arguments_is_refused():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))  # takes no value
    plan = BatchPlan(rows=ROWS, num_microbatches=2)
    step = make_train_step(dict_loss, optax.chain(sam, _BY_VALUE), None, plan, dropout=False)
    with pytest.raises(ValueError, match=r"needs arguments beside gradients and parameters \(.*'value'"):
        step(step.init(params_of()), batch_of(0))


@pytest.mark.slow
def test_a_state_whose_dtype_an_optimizer_would_change_keeps_it():
    """Else the second update would be another program, and a skipped one would leave another dtype than an applied."""

    def update(grads, state, params):
        total = jax.tree.map(lambda g, s: s.astype(jnp.float64) + g, grads, state)
        return jax.tree.map(lambda t, g: (-0.1 * t).astype(g.dtype), total, grads), total

    optimizer = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    step = make_train_step(
        dict_loss, optimizer, None, BatchPlan(rows=ROWS, num_microbatches=2), dropout=False
    )
    state = step.init(params_of(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            state, _ = step(state, batch_of(seed))
            assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)} == {jnp.dtype("float32")}
