"""Layers in halves, each computed again by itself: the gradients of one device, and what runs beside what."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb.forward_backward.layers.half_passes import HalfPasses
from jaxfb.forward_backward.layers.half_passes import LayerInHalves as OfStage
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.types import Halves

KEY = jax.random.key(5)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def first(weights, hidden, microbatch, rng):
    return hidden + jnp.tanh(hidden @ weights["w"] + weights["b"]) @ weights["w"]


def second(weights, hidden, microbatch, rng, beside=()):
    """Reads a parameter that the first half reads too, and reports a term of the loss."""
    return toy.layer(weights, hidden, microbatch, rng), beside


def layer(weights, hidden, microbatch, rng):
    return second(weights, first(weights, hidden, microbatch, rng), microbatch, rng)[0]


MODEL = replace(toy.model, layer=layer, halves=Halves(first, second))


def run(mesh, model=MODEL, num_microbatches=2, layers=4, **options):
    made = jaxfb.make_mesh(**mesh)
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, num_microbatches=num_microbatches, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(made, **options)
    return fb(model, toy.params(layers=layers), toy.batch(), plan, KEY)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({}, {}),
        ({"fsdp": 2}, {"gather_ahead": True}),
        slow({"data": 2, "fsdp": 2}, {"num_microbatches": 1}),
        slow({"fsdp": 2}, {"remat": "selective*1+halves", "gather_ahead": True}),
        slow({"fsdp": 2}, {"fsdp_gather": "step"}),
        slow({"pipe": 2}, {"schedule": "1f1b"}),
        slow({"pipe": 2}, {"schedule": "zero_bubble", "layers": 3, "layers_per_stage": (2, 1)}),
        slow({"data": 2}, {"optimizer_sharding": "gradients"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(mesh, options):
    got = run(mesh, **({"remat": "halves"} | options))
    wanted = run({}, layers=options.get("layers", 4))
    close((got.loss, got.terms, got.grads), (wanted.loss, wanted.terms, wanted.grads))


def test_without_halves_a_layer_is_computed_again_as_a_whole():
    got, wanted = (run({}, toy.model, remat=remat) for remat in ("halves", "layer"))
    close((got.loss, got.grads), (wanted.loss, wanted.grads))


def backward(second):
    """One layer's gradients, with what is kept for them."""
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), toy.params()["layers"])
    hidden = jnp.asarray(np.random.default_rng(2).normal(size=(toy.ROWS, toy.SEQ, toy.WIDTH)))
    passes = HalfPasses(OfStage(first, second), "inputs", lambda params: params)
    layer, inputs = Layers(weights, jnp.int32(0), jnp.bool_(True)), StageInputs(toy.batch(), None)
    after, out, kept = passes.forward(layer, hidden, inputs)
    seeds = {name: jnp.ones(()) for name in out.terms}
    return passes.backward(layer, kept, after, seeds, inputs), kept


def test_the_inputs_of_both_halves_are_kept():
    _, (before, between) = backward(second)
    weights = jax.tree.map(lambda leaf: leaf[0], toy.params()["layers"])
    close(between, first(weights, before, None, None))


def test_what_the_first_half_computes_again_is_handed_to_the_second():
    """Which may wait for it; parameters are not, nor what was kept."""
    seen = []

    def spy(weights, hidden, microbatch, rng, beside=()):
        seen.append([leaf.shape for leaf in jax.tree.leaves(beside)])
        return second(weights, hidden, microbatch, rng, beside)

    backward(spy)
    whole = (toy.ROWS, toy.SEQ, toy.WIDTH)
    assert seen[0] == [] and whole in seen[1] and (toy.WIDTH, toy.WIDTH) not in seen[1]


def test_the_first_halfs_gradients_come_from_what_the_second_handed_back():
    def losing(weights, hidden, microbatch, rng, beside=()):
        return toy.layer(weights, hidden, microbatch, rng), jax.tree.map(jnp.zeros_like, beside)

    (right, _), _ = backward(second)
    (wrong, _), _ = backward(losing)
    assert not np.allclose(right["b"], wrong["b"])
