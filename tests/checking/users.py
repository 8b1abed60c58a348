"""Models as a user would hand them to `jaxfb check --random N --model users:...`, some of them with a fault."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import toy

import jaxfb


def small():
    """Two layers, eight rows."""
    return toy.model, toy.params(layers=2), toy.batch(rows=8)


def mean_inside():
    """A loss that divides by what it counts itself: right on one device alone."""

    def loss(params, microbatch, rng):
        mask = microbatch["mask"]
        squares = ((params["embed"][microbatch["tokens"]] ** 2).sum(-1) * mask).sum()
        return jaxfb.Sum(squares / jnp.maximum(mask.sum(), 1), 1.0)

    return loss, {"embed": toy.params()["embed"]}, toy.batch(rows=8)


def _simple(loss):
    return loss, {"w": np.ones(3)}, {"x": np.ones((8, 3))}


def dies():
    """A loss function at which the process aborts."""
    return _simple(lambda params, microbatch, rng: os.abort())


def raises():
    """A function with a mistake of its own."""
    raise RuntimeError("boom")


def hangs():
    """A loss function that never returns."""
    return _simple(lambda params, microbatch, rng: time.sleep(1000))


def dies_on_a_mesh():
    """The process aborts where rows are split."""

    def loss(params, microbatch, rng):
        if not jax.sharding.get_abstract_mesh().empty:
            os.abort()
        return jaxfb.Sum((params["w"] * microbatch["x"]).sum(), None)

    return _simple(loss)


def nothing():
    """Not what `--model` asks for."""
