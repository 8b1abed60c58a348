"""Parameters in trees of every kind, a loss of them that a batch can spoil, and optimizers of every kind of state."""

from collections import OrderedDict
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

import jaxfb
from jaxfb import Sum

ROWS, WIDTH = 4, 4


def batch_of(seed=0, **controls):
    """Rows, and what makes an update of them go wrong: by default nothing does."""
    rng = np.random.default_rng(seed)
    rows = {"x": rng.normal(size=(ROWS, WIDTH)), "weight": np.ones(ROWS)}
    neutral = {"added": 0.0, "slope": 0.0, "under_root": 1.0}
    return rows | {name: np.full(ROWS, value) for name, value in (neutral | controls).items()}


def loss_of(matrix, vector, microbatch):
    """A loss of a [4, 4] and a [4] leaf, whose value or gradient the batch can spoil, one without the other.

    added: a constant of the loss. slope: of the vector's first number. under_root: 0 makes the vector's gradient nan.
    """
    dtype = matrix.dtype
    out = jnp.tanh(microbatch["x"].astype(dtype) @ matrix) @ vector
    first = lambda name: microbatch[name][0].astype(dtype)  # noqa: E731
    spoiled = first("slope") * vector[0] + jnp.sqrt(first("under_root") * jnp.sum(vector**2))
    share = len(microbatch["x"]) / ROWS
    return Sum((out**2).sum() + share * (spoiled + first("added")), microbatch["weight"].sum())


def dict_loss(params, microbatch, rng):
    return loss_of(params["matrix"], params["vector"], microbatch)


def arrays(dtype=np.float32):
    rng = np.random.default_rng(1)
    return rng.normal(size=(WIDTH, WIDTH)).astype(dtype), rng.normal(size=WIDTH).astype(dtype)


def params_of(dtype=np.float32):
    return dict(zip(("matrix", "vector"), arrays(dtype), strict=True))


class Pair(NamedTuple):
    matrix: jax.Array
    vector: jax.Array


class Module(eqx.Module):
    matrix: jax.Array
    vector: jax.Array

    def __call__(self, x):
        raise AssertionError("a module is parameters, not a function that makes some")


class Layer(nnx.Module):
    def __init__(self, matrix, vector):
        self.matrix, self.vector = nnx.Param(jnp.asarray(matrix)), nnx.Param(jnp.asarray(vector))


def by_attribute(params, microbatch, rng):
    return loss_of(params.matrix, params.vector, microbatch)


def of_state(params, microbatch, rng):
    return loss_of(params["matrix"][...], params["vector"][...], microbatch)


TREES = {
    "dict": (lambda matrix, vector: {"matrix": matrix, "vector": vector}, dict_loss),
    "OrderedDict": (lambda *both: OrderedDict(zip(("vector", "matrix"), both[::-1], strict=True)), dict_loss),
    "NamedTuple": (Pair, by_attribute),
    "equinox": (lambda *both: Module(*map(jnp.asarray, both)), by_attribute),
    "nnx": (lambda *both: nnx.state(Layer(*both)), of_state),
    "with empty leaves": (
        lambda *both: {**TREES["dict"][0](*both), "none": np.zeros((0, WIDTH), both[0].dtype)},
        dict_loss,
    ),
}

injected = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 9))
split = optax.multi_transform(
    {"fast": optax.sgd(0.1), "slow": optax.rmsprop(1e-3)}, {"matrix": "fast", "vector": "slow"}
)
CASES = {
    "adamw": (jaxfb.make_optimizer("adamw", learning_rate=0.1, weight_decay=0.1), "float32", "nnx"),
    "sgd": (optax.sgd(0.1, momentum=0.9), "bfloat16", "OrderedDict"),
    "lion": (jaxfb.make_optimizer("lion", learning_rate=0.01), "float16", "NamedTuple"),
    "adafactor": (jaxfb.make_optimizer("adafactor", learning_rate=0.1), "float32", "with empty leaves"),
    "muon": (jaxfb.make_optimizer("muon", learning_rate=0.1), "float32", "equinox"),
    "lamb": (optax.lamb(0.1), "float64", "dict"),
    "optimistic": (optax.optimistic_gradient_descent(0.1), "float32", "dict"),
    "optimistic in bfloat16": (optax.optimistic_gradient_descent(0.1), "bfloat16", "nnx"),
    "schedule-free": (optax.contrib.schedule_free_adamw(0.1), "float32", "equinox"),
    "inject_hyperparams": (injected, "float64", "NamedTuple"),
    "multi_transform": (split, "float16", "dict"),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 1), "float32", "OrderedDict"),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), "float32", "dict"),
    "noisy": (optax.noisy_sgd(0.1, key=0), "bfloat16", "dict"),
}
