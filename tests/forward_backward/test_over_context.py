"""Loss functions on a context axis equal one device or are refused."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfb
from jaxfb import Last, LossOutput, Max, Pipelined, Sum
from jaxfb.parallel.context import later, own_part, size_here, token_index

ROWS, LENGTH = 4, 8
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, LENGTH)),
    "mask": (RNG.random((ROWS, LENGTH)) > 0.3).astype(float),
    "features": RNG.normal(size=(ROWS, LENGTH, 3)),
    "score": RNG.normal(size=ROWS),
}
PARAMS = {"w": np.float64(0.7), "v": RNG.normal(size=(3, LENGTH // 2))}
MESHES = [{"context": 2}, {"context": 2, "data": 2}, {"context": 4}]


def run(loss, sizes, params=PARAMS, rng=5, **options):
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=sizes.get("data", 1))
    return jaxfb.get_forward_backward_func(jaxfb.make_mesh(**sizes), **options)(
        loss, params, BATCH, plan, rng
    )


def same_as_one_device(loss, sizes, **given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, one = (
            run(loss, sizes, **given),
            run(loss, {"data": sizes.get("data", 1)}, given.get("params", PARAMS)),
        )
    chex.assert_trees_all_close(out.outputs, one.outputs, rtol=0, atol=1e-13)
    chex.assert_trees_all_close((out.loss, out.grads), (one.loss, one.grads), rtol=0, atol=1e-12)
    chex.assert_trees_all_close(out.metrics, one.metrics, rtol=0, atol=1e-12)
    chex.assert_trees_all_close(out.terms, one.terms, rtol=0, atol=1e-12)
    chex.assert_trees_all_close(out.per_microbatch, one.per_microbatch, rtol=0, atol=1e-12)


# Functions that know nothing of the axis are given whole sequences


def shifted(params, microbatch, keys):
    """Reads the next token, drops tokens by its own masks, and takes the mean of a row."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (LENGTH,)))(keys)
    hidden = jnp.tanh(jnp.where(keep, microbatch["x"], 0) * params["w"])
    difference = hidden[:, :-1] - microbatch["x"][:, 1:]
    per_row = (difference**2 * microbatch["mask"][:, 1:]).mean(1)
    projected = (microbatch["features"] @ params["v"]).mean(1)
    outputs = {"row": per_row, "score": microbatch["score"], "projected": projected, "hidden": hidden}
    terms = {
        "next": Sum(per_row.sum(), microbatch["score"].shape[0]),
        "projected": Sum((projected**2).sum(), (microbatch["mask"].sum(1) > 2).sum()),
        "penalty": Sum(params["w"] ** 2, 1.0),
    }
    metrics = {
        "score": Sum(microbatch["score"].sum(), None),
        "largest": Max(hidden.max()),
        "end": Last(hidden[-1, -1]),
    }
    return LossOutput(terms, metrics, outputs)


@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_a_function_that_does_not_communicate_sees_whole_sequences(sizes):
    same_as_one_device(shifted, sizes)


def test_a_warning_names_an_axis_that_saves_nothing():
    with pytest.warns(
        UserWarning, match="does not communicate along the context axis, so all 2 devices .* whole"
    ):
        run(lambda p, mb, keys: Sum((mb["x"] * p["w"]).sum(), 1.0), {"context": 2})


@pytest.mark.slow
def test_stages_that_do_not_communicate_see_whole_sequences():
    model = Pipelined(
        lambda outer, mb, keys: mb["x"],
        lambda weights, hidden, mb, keys: jnp.tanh(hidden * weights),
        lambda outer, hidden, mb, keys: shifted(outer, {**mb, "x": hidden}, keys),
    )
    params = PARAMS | {"layers": np.array([0.3, -0.8])}
    same_as_one_device(model, {"context": 2, "pipe": 2}, params=params, schedule="zero_bubble")


# Functions that do communicate have their tokens, and what reads none of them counts once


def attending(params, microbatch, keys):
    """Each token reads the sum of its whole sequence."""
    x = microbatch["x"] * params["w"]
    total = x.sum(1) if size_here() == 1 else lax.psum(x.sum(1), "context")
    return jnp.tanh(x + total[:, None] / LENGTH)


def parts(params, microbatch, keys):
    hidden, mask = attending(params, microbatch, keys), microbatch["mask"]
    rows, score = microbatch["score"].shape[0], microbatch["score"]
    projected = jnp.tile(
        score[:, None] * params["w"], (1, hidden.shape[1] if size_here() > 1 else LENGTH // 2)
    )
    outputs = {
        "row": (hidden * mask).sum(1),
        "score": score,
        "scores": projected[:, :2],
        "hidden": hidden,
        "features": microbatch["features"] * hidden[..., None],
    }
    terms = {
        "tokens": Sum((hidden * mask).sum(), mask.sum()),
        "rows": Sum((hidden * mask).sum(), rows),
        "score": Sum((score * params["w"]).sum(), rows),
        "sum": Sum((score * params["w"] ** 2).sum(), None),
        "penalty": Sum(params["w"] ** 2, 1.0),
    }
    metrics = {
        "score": Sum(score.sum(), rows),
        "scores": Sum(jnp.stack([score.sum(), (score**2).sum()]), None),
        "share": Sum((hidden > 0).sum(), mask.sum()),
        "by row": Sum(hidden.sum(), rows),
        "largest": Max(hidden.max()),
        "last": Last(score[-1]),
    }
    return LossOutput(terms, metrics, outputs)


@pytest.mark.parametrize(
    ("sizes", "normalize"),
    [
        (MESHES[0], "global"),
        pytest.param(MESHES[1], "microbatch", marks=pytest.mark.slow),
        pytest.param(MESHES[2], "global", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_reads_no_token_counts_once(sizes, normalize):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, one = (run(parts, mesh, normalize=normalize) for mesh in (sizes, {"data": sizes.get("data", 1)}))
    for name in ("loss", "grads", "metrics", "outputs", "terms", "per_microbatch"):
        chex.assert_trees_all_close(getattr(out, name), getattr(one, name), rtol=0, atol=1e-12)


def test_static_sizes_are_those_of_whole_sequences():
    def loss(params, microbatch, keys):
        hidden = microbatch["x"] * params["w"] - later(microbatch["x"], 1)
        terms = {
            "squares": Sum((hidden**2 * microbatch["mask"]).sum(), microbatch["mask"].sum()),
            "penalty of each token": Sum(params["w"] ** 2 * hidden.size, hidden.size),
        }
        metrics = {
            "positive": Sum((hidden > 0).sum(), hidden.size),
            "norm of each token": Sum(params["w"] * hidden.size, hidden.size),
            "tokens": Sum(float(hidden.size)),
        }
        return LossOutput(terms, metrics)

    out, one = (run(loss, sizes) for sizes in ({"context": 2}, {}))
    for name in ("loss", "grads", "terms", "metrics", "per_microbatch"):
        chex.assert_trees_all_close(getattr(out, name), getattr(one, name), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_stages_that_communicate():
    def layer(weights, hidden, microbatch, keys):
        return attending({"w": weights}, {"x": hidden}, keys)

    def head(outer, hidden, microbatch, keys):
        return parts(outer, {**microbatch, "x": hidden}, keys)

    model = Pipelined(lambda outer, mb, keys: mb["x"], layer, head)
    params = PARAMS | {"layers": np.array([0.3, -0.8])}
    same_as_one_device(model, {"context": 2, "pipe": 2}, params=params)


def dropping(draw):
    """A communicating function with dropout: `draw(key, length of this device's part)`."""

    def loss(params, microbatch, keys):
        hidden = attending(params, microbatch, keys)
        keep = jax.vmap(lambda key: draw(key, hidden.shape[1]))(keys)
        return LossOutput(
            {"loss": Sum((hidden * keep).sum(), microbatch["mask"].sum())}, outputs=hidden * keep
        )

    return loss


def test_dropout_is_drawn_for_the_whole_sequence_or_refused():
    right = dropping(lambda key, length: own_part(jax.random.bernoulli(key, 0.5, (LENGTH,)), 0))
    same_as_one_device(right, {"context": 2})
    with pytest.raises(
        ValueError, match=r"random numbers of shape \(4,\) are drawn for a part .* whole length 8"
    ):
        run(dropping(lambda key, length: jax.random.bernoulli(key, 0.5, (length,))), {"context": 2})


def test_outputs_have_their_tokens_in_the_second_dim():
    def loss(params, microbatch, keys):
        hidden = attending(params, microbatch, keys)
        return LossOutput({"loss": Sum(hidden.sum(), 1.0)}, outputs=jnp.stack([hidden, hidden], axis=1))

    with pytest.raises(
        ValueError, match=r"only the second dim.*got shape \(2, 2, 4\) .* \(2, 2, 8\) for the"
    ):
        run(loss, {"context": 2})


def test_a_weight_may_be_counted_on_one_device_of_the_axis():
    """By its index, which makes it a part like any other."""

    def loss(params, microbatch, keys):
        hidden = attending(params, microbatch, keys)
        first = jnp.where(token_index(hidden.shape[1])[0] == 0, 1.0, 0.0)
        return Sum(hidden.sum(), first * microbatch["score"].shape[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, one = run(loss, {"context": 2}), run(loss, {})
    np.testing.assert_allclose((out.loss, out.terms["loss"].weight), (one.loss, ROWS), rtol=1e-13)


@jax.custom_vjp
def sums_of_one_call(w, x, mask):
    """A total and a weight out of one operation in which the parts of a row are exchanged."""
    return w * (later(x, 1) * mask).sum(), mask.sum()


sums_of_one_call.defvjp(
    lambda w, x, mask: (sums_of_one_call(w, x, mask), (later(x, 1) * mask).sum()),
    lambda moved, cotangents: (cotangents[0] * moved, None, None),
)


def test_a_weight_made_with_what_communicates_is_followed():
    def loss(params, microbatch, keys):
        return Sum(*sums_of_one_call(params["w"], microbatch["x"], microbatch["mask"]))

    same_as_one_device(loss, {"context": 2})


def test_a_weight_that_depends_on_parameters_is_refused_where_the_function_communicates():
    def loss(params, microbatch, keys):
        moved = later(microbatch["x"], 1).sum()
        return Sum(moved * params["w"], microbatch["mask"].sum() * params["w"] ** 2)

    with pytest.raises(ValueError, match=r"weight of term 'loss' must depend on the data .* params\['w'\]"):
        run(loss, {"context": 2})
