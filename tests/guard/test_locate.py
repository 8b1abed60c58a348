"""The layer in which the first nan or inf appears is found, in the forward pass and in the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb import LossOutput, Pipelined, Sum
from jaxfb.guard.locate import Place, first_nonfinite

LAYERS = 4


def layer(weights, hidden, microbatch, rng):
    # at the kink the root's value is 0 and its slope infinite
    rooted = jnp.sqrt(jnp.abs(hidden - weights["kink"])) * weights["gain"] if "kink" in weights else 0
    return hidden * weights["scale"] + weights["shift"] + rooted


def embed(outer, microbatch, rng):
    return outer["embed"][microbatch["tokens"]]


def head(outer, hidden, microbatch, rng):
    loss = jnp.square(hidden).sum() * outer["head"]
    return LossOutput({"square": Sum(loss, jnp.float32(hidden.shape[0]))})


MODEL = Pipelined(embed, layer, head)
MICROBATCH = {"tokens": np.arange(4)}


def params(**changed):
    scale, shift = np.ones(LAYERS, np.float32), np.full(LAYERS, 0.1, np.float32)
    tree = {
        "embed": np.ones((4, 3), np.float32),
        "head": np.float32(1),
        "layers": {"scale": scale, "shift": shift},
    }
    return jax.tree.map(jnp.asarray, tree | changed)


def with_layers(**leaves):
    tree = params()
    return tree | {
        "layers": tree["layers"] | {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
    }


def test_where_all_is_finite_there_is_no_place():
    assert first_nonfinite(MODEL, params(), MICROBATCH) is None


def test_a_term_may_have_no_weight():
    summed = Pipelined(embed, layer, lambda outer, hidden, microbatch, rng: Sum(hidden.sum() * outer["head"]))
    assert first_nonfinite(summed, params(), MICROBATCH) is None
    assert first_nonfinite(summed, params(head=np.float32(np.inf)), MICROBATCH) == Place("head")


@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_a_layer_is_named_by_its_number(number, value):
    bad = with_layers(shift=np.where(np.arange(LAYERS) == number, value, 0.1))
    assert first_nonfinite(MODEL, bad, MICROBATCH) == Place("layer", number)


def test_embed_and_head_are_named():
    assert first_nonfinite(MODEL, params(embed=np.full((4, 3), np.nan, np.float32)), MICROBATCH) == Place(
        "embed"
    )
    assert first_nonfinite(MODEL, params(head=np.float32(np.inf)), MICROBATCH) == Place("head")


def test_one_number_among_all_is_enough():
    table = np.ones((4, 3), np.float32)
    table[2, 1] = np.inf
    assert first_nonfinite(MODEL, params(embed=table), MICROBATCH) == Place("embed")


@pytest.mark.parametrize("number", [None, 2])
def test_hidden_values_may_be_a_tree_with_integers(number):
    """Which have no gradient and are always finite."""

    def count(weights, hidden, microbatch, rng):
        return {"x": layer(weights, hidden["x"], microbatch, rng), "count": hidden["count"] + 1}

    model = Pipelined(
        lambda *given: {"x": embed(*given), "count": jnp.zeros((4,), jnp.int32)},
        count,
        lambda outer, hidden, *rest: head(outer, hidden["x"], *rest),
    )
    tree = with_layers(shift=np.where(np.arange(LAYERS) == number, np.nan, 0.1))
    assert first_nonfinite(model, tree, MICROBATCH) == (None if number is None else Place("layer", number))


def test_a_gradient_that_breaks_where_the_values_are_finite():
    # layer 1 returns 0.5, the kink of layer 2: the gradient of what layer 1 returns is the first that is not finite
    broken = with_layers(
        scale=[1, 0, 1, 1], shift=[0.1, 0.5, 0.1, 0.1], kink=[9, 9, 0.5, 9], gain=[0, 0, 1, 0]
    )
    found = first_nonfinite(MODEL, broken, MICROBATCH)
    assert found is not None and found.backward and found.layer == 2 - 1
    assert str(found) == "the gradient of what layer 1 returns"


def test_a_gradient_that_breaks_in_the_first_layer_is_that_of_what_embed_returns():
    broken = with_layers(kink=[1, 9, 9, 9], gain=[1, 0, 0, 0])  # embed returns ones
    found = first_nonfinite(MODEL, broken, MICROBATCH)
    assert found == Place("embed", None, backward=True)
    assert str(found) == "the gradient of what embed returns"
