"""Leaves made by counting: over the whole batch, once an update, out of the optimizer's reach, at any split."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxfb
from jaxfb.types import Counted

ROWS, WIDTH, KINDS, LAYERS, RATE = 8, 4, 3, 2, 0.5
SEEN = []


def embed(outer, microbatch, rng):
    return microbatch["x"] @ outer["into"]


def layer(params, hidden, microbatch, rng):
    """Each row picks a kind; what is picked often costs more."""
    SEEN.append(params["bias"].dtype)
    scores = jax.nn.sigmoid(hidden @ params["kernel"])
    picked = jax.nn.one_hot(jnp.argmax(scores + jax.lax.stop_gradient(params["bias"]), axis=1), KINDS)
    cost = (scores * jax.lax.stop_gradient(params.get("often", jnp.zeros(KINDS)))).sum()
    metrics = {"picks": jaxfb.Sum(picked.sum(0), 1.0 * hidden.shape[0])}
    terms = {"cost": jaxfb.Sum(cost, 1.0 * hidden.shape[0])}
    return hidden + (picked * scores) @ params["kernel"].T, jaxfb.LossOutput(terms, metrics)


def head(outer, hidden, microbatch, rng):
    return jaxfb.Sum(jnp.sum((hidden @ outer["out"] - microbatch["y"]) ** 2), 1.0 * hidden.shape[0])


def are_counted(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("bias", "often"), params)


def before(params, metrics):
    return params | {"layers": params["layers"] | {"often": metrics["picks"].value}}


def after(params, metrics):
    picks = metrics["picks"].total
    bias = params["layers"]["bias"] + RATE * jnp.sign(picks.mean(-1, keepdims=True) - picks)
    return params | {"layers": params["layers"] | {"bias": bias}}


MODEL = jaxfb.Pipelined(embed, layer, head, counted=Counted(are_counted, before, after))
DRAW = np.random.default_rng(0)
BATCH = {"x": DRAW.normal(size=(ROWS, WIDTH)), "y": DRAW.normal(size=ROWS)}


def params(dtype=np.float64):
    draw = np.random.default_rng(1)
    return {
        "into": draw.normal(size=(WIDTH, WIDTH)).astype(dtype),
        "out": draw.normal(size=WIDTH).astype(dtype),
        "layers": {
            "kernel": draw.normal(size=(LAYERS, WIDTH, KINDS)).astype(dtype),
            "bias": np.tile(np.array([0.2, -0.1, 0.3], dtype), (LAYERS, 1)),
        },
    }


def plain(params):
    """(loss, picks [L, KINDS]) of all rows at once."""
    hidden, cost, found = BATCH["x"] @ params["into"], 0.0, []
    for kernel, bias in zip(*(params["layers"][name] for name in ("kernel", "bias")), strict=True):
        scores = jax.nn.sigmoid(hidden @ kernel)
        picked = jax.nn.one_hot(jnp.argmax(scores + jax.lax.stop_gradient(bias), axis=1), KINDS)
        cost += (scores.mean(0) * picked.mean(0)).sum() / LAYERS
        hidden = hidden + (picked * scores) @ kernel.T
        found.append(picked.sum(0))
    return jnp.mean((hidden @ params["out"] - BATCH["y"]) ** 2) + cost, jnp.stack(found)


@cache
def two_updates():
    """The parameters after two updates of one device, written out, and the second's loss."""
    now, losses = params(), []
    for _ in range(2):
        (loss, picks), grads = jax.value_and_grad(plain, has_aux=True)(now)
        bias = now["layers"]["bias"] + RATE * np.sign(picks.mean(-1, keepdims=True) - picks)
        now = jax.tree.map(lambda p, g: p - 0.1 * (g + 0.2 * p), now, grads)
        now["layers"]["bias"] = bias
        losses.append(loss)
    return now, losses


def train_step(mesh, num_microbatches, **options):
    """With an optimizer that would decay every leaf."""
    optimizer = optax.chain(optax.add_decayed_weights(0.2), optax.sgd(0.1))
    replicas = int(
        np.prod([size for axis, size in mesh.shape.items() if axis in ("data", "fsdp")], dtype=int)
    )
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    return jaxfb.make_train_step(MODEL, optimizer, mesh, plan, **options)


def own_mesh():
    return jax.make_mesh((2, 2), ("data", "pipe"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    "mesh, num_microbatches, options",
    [
        (lambda: jaxfb.make_mesh(data=2), 2, {}),
        pytest.param(
            own_mesh, 2, {"schedule": "zero_bubble", "poison_bubbles": True}, marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: jaxfb.make_mesh(pipe=2, fsdp=2),
            2,
            {"schedule": "gpipe", "remat": "full"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "own mesh", "pipe-fsdp"],
)
def test_an_update_is_that_of_one_device(mesh, num_microbatches, options):
    step = train_step(mesh(), num_microbatches, **options)
    state = step.init(params())
    wanted, losses = two_updates()
    for loss in losses:
        state, metrics = step(state, BATCH)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), state.params, wanted)
    np.testing.assert_array_equal(state.params["layers"]["bias"], wanted["layers"]["bias"])


def test_a_skipped_update_moves_nothing():
    step = train_step(jaxfb.make_mesh(data=2), 2)
    state, metrics = step(step.init(params()), BATCH | {"y": BATCH["y"] * np.nan})
    assert metrics.skipped
    np.testing.assert_array_equal(state.params["layers"]["bias"], params()["layers"]["bias"])


def test_what_is_counted_is_never_cast():
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2)
    for fsdp_gather in ("layer", "step"):
        fb = jaxfb.get_forward_backward_func(compute_dtype="bfloat16", fsdp_gather=fsdp_gather)
        SEEN.clear()
        grads = jax.eval_shape(lambda p, fb=fb: fb(MODEL, p, BATCH, plan).grads, params(np.float32))
        assert set(SEEN) == {jnp.dtype("float32")}
        assert jax.tree.structure(grads) == jax.tree.structure(params())


def test_a_layers_metric_is_a_sum_under_a_name_of_its_own():
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=1)
    fb = jaxfb.get_forward_backward_func()

    def run(layer, head):
        jax.eval_shape(lambda p: fb(jaxfb.Pipelined(embed, layer, head), p, BATCH, plan), params())

    def of_layer(metric):
        return lambda p, h, mb, rng: (h, jaxfb.LossOutput({}, {"seen": metric}))

    with pytest.raises(ValueError, match="a layer's metric must be a jaxfb.Sum, 'seen' is a Max"):
        run(of_layer(jaxfb.Max(1.0)), head)
    with pytest.raises(ValueError, match="both return a metric named 'seen'"):
        run(
            of_layer(jaxfb.Sum(1.0)),
            lambda *args: jaxfb.LossOutput({"loss": head(*args)}, {"seen": jaxfb.Sum(1.0)}),
        )
