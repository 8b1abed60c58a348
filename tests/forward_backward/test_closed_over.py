"""Loss functions that close over values whose numbers are not known yet: of a surrounding jit, or frozen parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb
from jaxfb import Last, LossOutput, Pipelined, Sum

ROWS, WIDTH, FACTOR = 4, 4, 3.0
RNG = np.random.default_rng(0)
PARAMS = {
    "into": RNG.normal(size=(WIDTH, WIDTH)),
    "gain": RNG.normal(size=WIDTH),
    "layers": {"w": RNG.normal(size=(2, WIDTH, WIDTH))},
}
BATCH = {"x": RNG.normal(size=(ROWS, WIDTH)), "mask": np.ones(ROWS)}


def model(factor):
    """Its terms and metrics are multiplied by a factor that it is not given."""

    def head(outer, hidden, microbatch, rng):
        mask, gain = microbatch["mask"], outer["gain"]
        error = ((hidden**2 * gain).sum(-1) * mask).sum()
        terms = {"error": Sum(factor * error, mask.sum()), "penalty": Sum(factor * (gain**2).sum(), 1.0)}
        return LossOutput(terms, {"factor": Last(factor), "mean": Sum(factor, 1.0)})

    return Pipelined(
        lambda outer, microbatch, rng: microbatch["x"] @ outer["into"],
        lambda weights, hidden, microbatch, rng: jnp.tanh(hidden @ weights["w"]),
        head,
    )


def whole(params, batch):
    """Loss of one device."""
    one = model(FACTOR)
    hidden = one.embed(params, batch, None)
    for w in params["layers"]["w"]:
        hidden = one.layer({"w": w}, hidden, batch, None)
    return sum(term.value for term in one.head(params, hidden, batch, None).terms.values())


def run(model, sizes, rows=ROWS, **options):
    mesh = jaxfb.make_mesh(**sizes)
    plan = jaxfb.BatchPlan(
        rows=rows, rows_per_microbatch=2, data_parallel=jaxfb.mesh.data_parallel(mesh), remainder="pad"
    )
    batch = {name: leaf[:rows] for name, leaf in BATCH.items()}
    return jaxfb.get_forward_backward_func(mesh, **options)(model, PARAMS, batch, plan)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({"data": 2}, {"rows": 3}),
        ({"pipe": 2}, {"head_placement": "rows"}),
        pytest.param({"context": 2}, {}, marks=pytest.mark.filterwarnings("ignore")),
    ],
    ids=str,
)
def test_a_traced_factor_is_that_of_one_device(sizes, options):
    out = jax.jit(lambda factor: run(model(factor), sizes, **options))(FACTOR)
    batch = {name: leaf[: options.get("rows", ROWS)] for name, leaf in BATCH.items()}
    loss, grads = jax.value_and_grad(whole)(jax.tree.map(jnp.asarray, PARAMS), batch)
    chex.assert_trees_all_close((out.loss, out.grads), (loss, grads), atol=1e-12)
    assert float(out.metrics["factor"]) == float(out.metrics["mean"]) == FACTOR


def noisy(key):
    def loss_fn(params, microbatch, rng):
        noise = jax.random.normal(key, (WIDTH,))
        error = ((microbatch["x"] + noise) @ params["gain"]) ** 2 * microbatch["mask"]
        return Sum(error.sum(), microbatch["mask"].sum())

    return loss_fn


@pytest.mark.parametrize("rows", [ROWS, 3])
def test_a_key_that_is_closed_over_draws_the_same_as_on_one_device(rows):
    loss_fn = noisy(jax.random.key(1))
    out = run(loss_fn, {"data": 2}, rows)
    batch = {name: leaf[:rows] for name, leaf in BATCH.items()}
    loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch, None).value)(PARAMS)
    chex.assert_trees_all_close((out.loss, out.grads), (loss, grads), atol=1e-12)


def test_a_key_that_is_closed_over_in_a_sum_that_reads_no_row_is_refused():
    def loss_fn(params, microbatch, rng):
        term = noisy(jax.random.key(1))(params, microbatch, rng)
        return Sum(term.total + jax.random.normal(jax.random.key(2)), term.weight)

    with pytest.raises(ValueError, match="reads no row"):
        run(loss_fn, {})


def test_a_traced_value_that_each_microbatch_would_count_is_refused():
    def loss_fn(added):
        return lambda params, microbatch, rng: Sum(
            (microbatch["x"] @ params["gain"]).sum() + added, microbatch["x"].shape[0]
        )

    with pytest.raises(
        ValueError, match="reads no row, a traced value that the loss function closes over, so"
    ):
        jax.jit(lambda added: run(loss_fn(added), {}).loss)(1.0)


def test_a_traced_value_that_rows_of_zeros_count_is_refused():
    def loss_fn(factor):
        return lambda params, microbatch, rng: Sum(
            factor * (microbatch["x"] @ params["gain"] + 1).sum(), microbatch["mask"].sum()
        )

    with pytest.raises(ValueError, match="rows of zeros, and term 'loss' counts them"):
        jax.jit(lambda factor: run(loss_fn(factor), {}, 3).loss)(1.0)


ROWS_OF_STAGES = {"sizes": {"pipe": 2}, "head_placement": "rows", "trainable": ["layers"]}


def test_stages_that_share_the_rows_read_frozen_parameters():
    out = run(model(FACTOR), **ROWS_OF_STAGES)
    loss, grads = jax.value_and_grad(whole)(jax.tree.map(jnp.asarray, PARAMS), BATCH)
    chex.assert_trees_all_close((out.loss, out.grads["layers"]), (loss, grads["layers"]), atol=1e-12)


def test_stages_that_share_the_rows_refuse_a_frozen_penalty_in_their_sum():
    def head(outer, hidden, microbatch, rng):
        return Sum(hidden.sum() + (outer["gain"] ** 2).sum(), 1.0)

    one = model(FACTOR)
    with pytest.raises(ValueError, match='head_placement="rows" needs sums over rows'):
        run(Pipelined(one.embed, one.layer, head), **ROWS_OF_STAGES)
