"""Totals that add up what reads no row, or no token, and experts of one device: as on one device, or refused."""

import dataclasses
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb import LossOutput, Pipelined, Sum
from jaxfb.parallel.context import later
from jaxfb.parallel.expert import dispatch, of_all_experts

ROWS, LENGTH, WIDTH = 8, 4, 3
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, LENGTH, WIDTH)),
    "mask": (RNG.random((ROWS, LENGTH)) > 0.3).astype(float),
    "score": RNG.normal(size=ROWS),
}
PARAMS = {
    "out": RNG.normal(size=WIDTH),
    "layers": {"w": RNG.normal(size=(2, WIDTH, WIDTH)), "up": RNG.normal(size=(2, 4, WIDTH, WIDTH))},
}


def model(term, layer_term=None):
    """term: (penalty, squared errors, microbatch) -> Sum. layer_term: (weights, hidden) -> Sum."""

    def layer(weights, hidden, microbatch, rng):
        hidden = hidden + jnp.tanh(hidden @ weights["w"])
        return (hidden, {"of_layers": layer_term(weights, hidden)}) if layer_term else hidden

    def head(outer, hidden, microbatch, rng):
        errors = jnp.square(hidden @ outer["out"])
        return LossOutput({"term": term(jnp.square(outer["out"]).sum(), errors, microbatch)})

    return Pipelined(lambda outer, microbatch, rng: microbatch["x"], layer, head)


def run(model, sizes=None, rows_per_microbatch=4, params=PARAMS, **options):
    mesh = jaxfb.make_mesh(**sizes) if sizes else None
    replicas = jaxfb.mesh.data_parallel(mesh) if sizes else 1
    plan = jaxfb.BatchPlan(
        rows=ROWS, rows_per_microbatch=rows_per_microbatch // replicas, data_parallel=replicas
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jaxfb.get_forward_backward_func(mesh, **options)(model, params, BATCH, plan)


def same(model, sizes, rows_per_microbatch=4, params=PARAMS, **options):
    found = run(model, sizes, rows_per_microbatch, params, **options)
    wanted = run(model, None, ROWS, params)
    chex.assert_trees_all_close((found.loss, found.grads), (wanted.loss, wanted.grads), rtol=1e-12)


def squares(penalty, errors, microbatch):
    return Sum(errors.sum(), errors.size)


MIXED = {
    "added": lambda penalty, errors, _: Sum(errors.sum() + penalty, errors.size),
    "jitted": lambda penalty, errors, _: Sum(
        jax.jit(lambda p, e: (e.sum() - 2 * p) / 3)(penalty, errors), errors.size
    ),
    "over_a_mask": lambda penalty, _, microbatch: Sum(penalty, microbatch["mask"].sum()),
    "over_rows": lambda penalty, errors, _: Sum(penalty, errors.size),
    "without_a_weight": lambda penalty, errors, _: Sum(errors.sum() + penalty),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_each_microbatch_would_count_is_refused(name):
    with pytest.raises(
        ValueError, match=r"'term' adds up.*no row.*params\['out'\].*each of the 2 microbatches"
    ):
        run(model(MIXED[name]))
    run(model(MIXED[name]), rows_per_microbatch=ROWS)


def test_a_constant_that_each_microbatch_would_count_is_refused():
    mixed = model(lambda penalty, errors, _: Sum(errors.sum() + 5.0, errors.size))
    with pytest.raises(ValueError, match="'term' adds up something that reads no row, a constant, so"):
        run(mixed)
    run(mixed, rows_per_microbatch=ROWS)


def test_what_each_microbatch_would_count_in_layers_is_refused():
    def layer_term(weights, hidden):
        return Sum(hidden.sum() + jnp.square(weights["w"]).sum(), hidden.shape[0])

    with pytest.raises(ValueError, match=r"'of_layers' adds up.*params\['layers'\]\['w'\]"):
        run(model(squares, layer_term))


@pytest.mark.parametrize(
    "term",
    [
        lambda penalty, errors, _: Sum(errors.sum() + penalty * errors.size, errors.size),
        lambda penalty, errors, _: Sum((errors + penalty).sum(), errors.size),
        lambda penalty, errors, _: Sum(errors.sum() + 0.0 * penalty, errors.size),
        lambda penalty, errors, at: Sum(
            (errors * at["mask"]).sum() + penalty * at["mask"].sum(), at["mask"].sum()
        ),
        lambda penalty, errors, _: Sum(errors.mean() + penalty, 1.0),
        lambda penalty, errors, _: Sum(errors.sum() + 5.0 * len(errors), errors.size),
    ],
    ids=["of_each", "broadcast", "times_zero", "of_the_mask", "of_means", "constant_of_each"],
)
def test_sums_over_rows_are_not_refused(term):
    same(model(term), {"data": 2})


def test_a_loss_for_one_number_of_rows_is_not_refused():
    fixed = jnp.ones((4, LENGTH))
    run(model(lambda penalty, errors, _: Sum((errors * fixed).sum() + penalty, errors.size)))


def test_stages_that_share_the_rows_refuse_it_in_one_microbatch_too():
    mixed = model(MIXED["added"])
    with pytest.raises(ValueError, match="head_placement=\"rows\" needs sums over rows, but 'term' adds"):
        run(mixed, {"pipe": 2}, ROWS, head_placement="rows")
    same(mixed, {"pipe": 2}, ROWS, head_placement="last")


def over_tokens(term):
    """A model that communicates along the context axis."""

    def of_cut_tokens(penalty, errors, microbatch):
        return term(penalty, errors + jnp.square(later(microbatch["mask"], 1)), microbatch)

    return model(of_cut_tokens)


def test_devices_that_share_the_tokens_refuse_it_in_one_microbatch_too():
    with pytest.raises(ValueError, match="'term' adds something that reads no token"):
        run(over_tokens(MIXED["added"]), {"context": 2}, ROWS)


@pytest.mark.parametrize(
    "of_each_token",
    [lambda given, mask: jnp.broadcast_to(given[:, None], mask.shape).sum(), lambda given, mask: given.sum()],
    ids=["a_token", "a_row"],
)
def test_scores_of_rows_count_as_often_as_whole_sequences_count_them(of_each_token):
    def layer_term(weights, hidden):
        return Sum(jnp.square(later(hidden, 1)).sum(), hidden.shape[0])

    def term(penalty, errors, microbatch):
        return Sum(of_each_token(microbatch["score"] * penalty, microbatch["mask"]), microbatch["mask"].sum())

    same(model(term, layer_term), {"context": 2})


def experts(whole):
    """A mixture of experts with a penalty on their weights; whole: of all of them."""

    def layer(weights, hidden, microbatch, rng):
        tokens, up = hidden.reshape(-1, WIDTH), weights["up"]
        probs, chosen = lax.top_k(jax.nn.softmax(tokens @ jnp.ones((WIDTH, 4)) * jnp.arange(4.0)), 2)

        def apply(rows, sizes, state):
            return jnp.tanh(lax.ragged_dot(rows.values, up, sizes)) * rows.weights, state

        out, _ = dispatch(apply, (), tokens, chosen.astype(jnp.int32), probs, 4, up.shape[0])
        penalty = jnp.square(up).sum()
        penalty = of_all_experts(penalty, 4, up.shape[0]) if whole else penalty
        return hidden + out.reshape(hidden.shape), {"of_layers": Sum(penalty, 1.0)}

    def specs(params):
        return jax.tree.map(lambda _: P(), params) | {"layers": {"w": P(), "up": P(None, "expert")}}

    return dataclasses.replace(model(squares), layer=layer, param_specs=specs)


def test_a_penalty_on_experts_counts_those_of_all_devices():
    with pytest.raises(ValueError, match=r"reads params\['layers'\]\['up'\].*of_all_experts"):
        run(experts(whole=False), {"expert": 2})
    found = run(experts(whole=True), {"expert": 2, "data": 2}, rows_per_microbatch=ROWS)
    wanted = run(experts(whole=True), None, ROWS)
    # the weight counts each layer
    chex.assert_trees_all_close((found.loss, found.grads), (wanted.loss, wanted.grads), rtol=1e-12)


REDUCED = {
    "psum": lambda total: lax.psum(total, "data"),
    "a half": lambda total: 0.5 * lax.psum(total, ("data", "fsdp")) + 0.0,
    "pmean": lambda total: lax.pmean(total, "data"),
    "within a jit": jax.jit(lambda total: lax.psum(total, "data").astype(float)),
}


@pytest.mark.parametrize("reduce", REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("of", ["total", "weight"])
@pytest.mark.parametrize("kind", ["terms", "metrics"])
def test_a_sum_that_the_loss_function_reduces_over_replicas_is_refused(reduce, kind, of):
    def loss_fn(params, microbatch, rng):
        total, weight = jnp.square(microbatch["x"] @ params["out"]).sum(), microbatch["mask"].sum()
        reduced = {"twice": Sum(reduce(total), weight) if of == "total" else Sum(total, reduce(weight))}
        return LossOutput(**{"terms": {"once": Sum(total, weight)}, kind: reduced})

    with pytest.raises(ValueError, match="'twice' is summed over the devices of data.* once more"):
        run(loss_fn, {"data": 2})


def test_a_statistic_of_all_replicas_may_divide_or_multiply_what_each_adds():
    def loss_fn(reduced):
        def of_rows(params, microbatch, rng):
            error = jnp.square(microbatch["x"] @ params["out"]).sum()
            largest = reduced(microbatch["mask"].sum())
            return Sum(error * largest / (1 + largest), microbatch["mask"].sum())

        return of_rows

    found = run(loss_fn(lambda x: lax.psum(x, "data")), {"data": 2}, ROWS)
    wanted = run(loss_fn(lambda x: x), None, ROWS)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-12)
