"""An optax update that is tried before it is applied: its parts, and what in them is not finite."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfb import gradients
from jaxfb.output import ForwardBackwardOutput
from jaxfb.trainable import joined, like
from jaxfb.types import PyTree
from jaxfb.update.train_state import NonFinite


class Attempt(NamedTuple):
    """The result of one optax update of the trained parameters, whether it will be applied or not."""

    params: PyTree
    opt_state: PyTree
    updates: PyTree
    clip_coefficient: jax.Array


class Measured(NamedTuple):
    """Numbers of an attempt, by which it is judged and recorded.

    squares: of each trained leaf the sum of its updates' squares, float[].
    bad:     of each trained leaf how many parameters are not finite, or become so by a finite update, float[].
    learning_rate: None if it is unknown.
    """

    squares: list[jax.Array]
    bad: list[jax.Array]
    clip_coefficient: jax.Array
    learning_rate: jax.Array | None


class Trial(NamedTuple):
    """An update that was tried: what was measured of it, what of it is not finite, and whether it is applied."""

    measured: Measured
    grads: PyTree
    grad_norm: jax.Array
    param_norm: jax.Array
    nonfinite: NonFinite
    spike: jax.Array | None
    applied: jax.Array


def find_nonfinite(loss, grads, params, measured: Measured, counted) -> NonFinite:
    """Returns what was not finite, each part where it begins; without counted rows no update was wanted.

    params: all of them; of a frozen one nothing is read.
    """
    trained = like(grads, params)

    def flagged(flags):
        """Returns the flags of all parameters from those of the trained ones."""
        of_trained = jax.tree.unflatten(jax.tree.structure(trained), list(flags))
        return jnp.stack(
            jax.tree.leaves(joined(of_trained, jax.tree.map(lambda _: jnp.bool_(False), params)))
        )

    of_gradients = gradients.nonfinite_leaves(grads)
    of_updates = gradients.nonfinite_squares(measured.squares) & ~jnp.any(of_gradients) & counted
    of_params = [number > 0 for number in measured.bad]
    return NonFinite(~jnp.isfinite(loss), *map(flagged, (of_gradients, of_updates, of_params)))


def count_bad(old: PyTree, updates: PyTree, new: PyTree) -> list[jax.Array]:
    """Returns how many parameters of each leaf are not finite, or become so by a finite update, float[]."""

    def count(old, update, new):
        # A sum, as for the norm of the updates: a TPU's compiler takes both in one pass. For `all` it makes another one
        # and stores the updates for it: 163 MB in place of 135 for the pipelines of benchmarks/pipeline_tpu.py.
        # The flags are converted, not selected from zeros and ones: XLA for GPUs would take these zeros from those that
        # the sums of gradients begin with, and keep them through all microbatches (2.7 GB for 8B on 8 H100).
        return jnp.sum(~jnp.isfinite(jnp.where(jnp.isfinite(update), new, old)), dtype=jnp.float32)

    return jax.tree.leaves(jax.tree.map(count, old, updates, new))


def exceeds(limits: jax.Array, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns bool[], whether loss or gradient norm are above their limits f32[2]."""
    return jnp.any(jnp.stack([loss, norm]).astype(jnp.float32) > limits)


def rows_count(out: ForwardBackwardOutput, normalize: str) -> jax.Array:
    """Returns bool[], whether the rows count: some term has a divisor other than zero.

    That is its weight over the global batch, or where each microbatch is divided by itself, its weight there.
    """
    divided = out.terms if normalize == "global" else {name: out.per_microbatch[name] for name in out.terms}
    return jnp.any(jnp.stack([jnp.any(term.weight != 0) for term in divided.values()]))


def of_dtype(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` in the dtype of `old`."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)
