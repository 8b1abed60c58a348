"""Parameters in any container, and leaves that nothing reads or that hold nothing, on every path to a gradient."""

from collections import OrderedDict
from typing import Any, NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from jax import lax
from marks import some_slow

import jaxfb
from jaxfb import LossOutput, Pipelined, Sum

ROWS, WIDTH, LAYERS = 8, 4, 4
RNG = np.random.default_rng(0)
LAYER = {"w": RNG.normal(size=(LAYERS, WIDTH, WIDTH)), "b": RNG.normal(size=(LAYERS, WIDTH))}
PARAMS = {"layers": LAYER, "gain": RNG.normal(size=WIDTH)}
BATCH = {"x": RNG.normal(size=(ROWS, WIDTH))}


def embed(outer, microbatch, rng):
    return microbatch["x"] * outer["gain"]


def layer(weights, hidden, microbatch, rng):
    return jnp.tanh(hidden @ weights["w"] + weights["b"])


def head(outer, hidden, microbatch, rng):
    return LossOutput({"loss": Sum((hidden**2 * outer["gain"]).sum(), hidden.shape[0])})


MODEL = Pipelined(embed, layer, head)


def gradient():
    """Of the whole batch, without the engine."""

    def loss(params):
        hidden = embed(params, BATCH, None)
        for index in range(LAYERS):
            hidden = layer(jax.tree.map(lambda leaf: leaf[index], params["layers"]), hidden, BATCH, None)  # noqa: B023
        return head(params, hidden, BATCH, None).terms["loss"].value

    return jax.grad(loss)(jax.tree.map(jnp.asarray, PARAMS))


def run(model, params, sizes, **options):
    replicas = int(np.prod([size for axis, size in sizes.items() if axis != "pipe"], dtype=int))
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=replicas)
    return jaxfb.get_forward_backward_func(jaxfb.make_mesh(**sizes), **options)(model, params, BATCH, plan)


class Pair(NamedTuple):
    w: Any
    b: Any


class Linear(eqx.Module):
    w: jax.Array
    b: jax.Array
    activation: Any = eqx.field(static=True)


def state(tree):
    return nnx.State(
        {name: state(v) if isinstance(v, dict) else nnx.Param(jnp.asarray(v)) for name, v in tree.items()}
    )


def plain(tree):
    """What the stages read, out of variables."""
    return {name: value[...] if isinstance(value, nnx.Variable) else value for name, value in tree.items()}


OF_PAIRS = Pipelined(embed, lambda p, *rest: layer(p._asdict(), *rest), head)
OF_MODULES = Pipelined(embed, lambda p, *rest: layer({"w": p.w, "b": p.b}, *rest), head)
OF_STATE = Pipelined(
    lambda outer, *rest: embed(plain(outer), *rest),
    lambda p, *rest: layer(plain(p), *rest),
    lambda outer, *rest: head(plain(outer), *rest),
)
CONTAINERS = {
    "OrderedDict": (MODEL, OrderedDict(reversed(PARAMS.items()))),
    "FrozenDict": (MODEL, freeze(PARAMS)),
    "layers in a NamedTuple": (OF_PAIRS, PARAMS | {"layers": Pair(**LAYER)}),
    "layers in a module": (OF_MODULES, PARAMS | {"layers": Linear(**LAYER, activation=jnp.tanh)}),
    "nnx.State": (OF_STATE, state(PARAMS)),
}


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2}, pytest.param({"pipe": 2, "fsdp": 2}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_gradients_come_in_the_containers_of_the_parameters(kind, sizes):
    model, params = CONTAINERS[kind]
    grads = run(model, params, sizes).grads
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    wanted = gradient()
    by_path = dict(jax.tree_util.tree_leaves_with_path(state(wanted) if kind == "nnx.State" else wanted))
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    assert len(leaves) == len(by_path) == 3
    for name in ("w", "b", "gain"):
        (got,) = (leaf for path, leaf in leaves.items() if name in path)
        np.testing.assert_allclose(got, wanted["layers"].get(name, wanted.get(name)), rtol=0, atol=1e-13)


def test_a_partitioned_module_is_a_tree_of_parameters():
    mlp = eqx.nn.MLP(WIDTH, 1, 5, 1, key=jax.random.key(0), dtype=jnp.float64)
    arrays, rest = eqx.partition(mlp, eqx.is_inexact_array)

    def loss_fn(params, microbatch, rng):
        return Sum(jax.vmap(eqx.combine(params, rest))(microbatch["x"]).sum(), microbatch["x"].shape[0])

    grads = run(loss_fn, arrays, {"data": 2}).grads
    chex.assert_trees_all_close(grads, jax.grad(lambda p: loss_fn(p, BATCH, None).value)(arrays), atol=1e-13)


# Leaves that no gradient reaches

ODD = {
    "layers": LAYER
    | {
        "unread": np.ones((LAYERS, 2)),
        "stopped": np.ones((LAYERS, WIDTH)),
        "flag": np.ones(LAYERS),
        "empty": np.zeros((LAYERS, 0, 3)),
    },
    "gain": PARAMS["gain"],
    "empty": np.zeros((0, 3)),
    "unread": np.ones(3),
}


def odd_layer(weights, hidden, microbatch, rng):
    after = layer(weights, hidden, microbatch, rng) + 0 * lax.stop_gradient(weights["stopped"])
    return jnp.where(weights["flag"] > 0, after, hidden)


PATHS = {
    "accumulation": ({"data": 2}, {}),
    "fsdp": ({"fsdp": 2}, {}),
    "1f1b": ({"pipe": 2}, dict(schedule="1f1b")),
    "interleaved": ({"pipe": 2}, dict(schedule="interleaved", num_chunks=2)),
    "zero_bubble": ({"pipe": 2}, dict(schedule="zero_bubble")),
    "zero_bubble, layer": ({"pipe": 2, "fsdp": 2}, dict(schedule="zero_bubble", remat="layer")),
    "zero_bubble, full": ({"pipe": 2}, dict(schedule="zero_bubble", remat="full")),
    "v_shape": ({"pipe": 2}, dict(schedule="v_shape", num_chunks=2)),
    "gpipe": ({"pipe": 2, "fsdp": 2}, dict(schedule="gpipe")),
    "uneven": ({"pipe": 2}, dict(schedule="zero_bubble", layers_per_stage=(1, 3))),
}


@pytest.mark.parametrize("path", some_slow(PATHS, fast=("accumulation", "fsdp", "1f1b", "zero_bubble")))
def test_leaves_that_no_gradient_reaches_have_a_zero_one(path):
    sizes, options = PATHS[path]
    grads = run(Pipelined(embed, odd_layer, head), ODD, sizes, **options).grads
    zeros = jax.tree.map(np.zeros_like, ODD)
    wanted = gradient()
    wanted = zeros | wanted | {"layers": zeros["layers"] | wanted["layers"]}
    chex.assert_trees_all_close(grads, wanted, rtol=0, atol=1e-13)


def test_keys_in_a_batch_are_padded_with_keys():
    """A key cannot be zero; those of rows that fill up a microbatch are drawn from and count nothing."""

    def loss_fn(params, microbatch, rng):
        drawn = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(microbatch["key"])
        error = jnp.square(microbatch["x"] * params - drawn).sum(-1) * microbatch["mask"]
        return Sum(error.sum(), microbatch["mask"].sum())

    params, batch = jnp.ones(WIDTH), {"x": RNG.normal(size=(5, WIDTH)), "mask": np.ones(5)}
    batch["key"] = jax.random.split(jax.random.key(0), 5)
    wanted = jax.value_and_grad(lambda params: loss_fn(params, batch, None).value)(params)
    plan = jaxfb.BatchPlan(rows=5, rows_per_microbatch=2, remainder="pad")
    out = jaxfb.get_forward_backward_func()(loss_fn, params, batch, plan)
    chex.assert_trees_all_close((out.loss, out.grads), wanted, rtol=1e-12)


def test_a_key_among_the_parameters_is_refused():
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2)
    fb = jaxfb.get_forward_backward_func(trainable=["gain"])
    with pytest.raises(ValueError, match=r"params\['key'\] is key<fry>; pass a key as rng"):
        fb(lambda *_: Sum(0.0), {"gain": jnp.ones(2), "key": jax.random.key(0)}, BATCH, plan)


@pytest.mark.parametrize("sizes", [{"data": 2}, pytest.param({"pipe": 2}, marks=pytest.mark.slow)], ids=str)
def test_outputs_of_no_numbers_have_a_row_for_each(sizes):
    def with_outputs(outer, hidden, microbatch, rng):
        return LossOutput(head(outer, hidden, microbatch, rng).terms, {}, [hidden[:, :0], hidden[:, :1]])

    nothing, first = run(Pipelined(embed, layer, with_outputs), PARAMS, sizes).outputs
    assert nothing.shape == (ROWS, 0) and first.shape == (ROWS, 1)


def test_outputs_of_a_layer_are_refused():
    def with_outputs(weights, hidden, microbatch, rng):
        return layer(weights, hidden, microbatch, rng), LossOutput({}, {}, hidden)

    with pytest.raises(ValueError, match=r"without outputs, which only the head has; add them to hidden"):
        run(Pipelined(embed, with_outputs, head), PARAMS, {"pipe": 2})
