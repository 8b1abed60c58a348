"""Makes the direction of Muon: each matrix's momentum, orthogonalised, and Adam's for what is not a hidden matrix.

The iteration that orthogonalises a matrix multiplies it by itself again and again. Of a matrix that is cut over devices
every product would be communicated. So where the devices are known they hand each other whole matrices, each gets some
layers, and hands the results back: two exchanges, as in distributed Muon (arXiv:2502.16982, section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax
import optax.contrib
from jax.sharding import NamedSharding

from jaxfb.optim.hyperparameters import like_params
from jaxfb.optim.leaves import has_word, layer_ndims, path_names
from jaxfb.parallel.layers.whole import map_whole_layers
from jaxfb.types import PyTree


def muon_matrices(params: PyTree) -> PyTree:
    """Returns the leaves that Muon orthogonalises, as a tree of bool: hidden matrices.

    Leaves of two dimensions in one layer, or of three under a name with "expert"; each layer and expert is a
    separate matrix. Embeddings and the head are left to AdamW, as Muon's author advises, and so are other
    shapes, whose rows and columns are unknown.
    """

    def is_matrix(path, ndim):
        matrix = ndim == 2 or (ndim == 3 and has_word(path, "expert"))
        # "MultiHeadAttention" is not the head
        head = "layers" not in path_names(path) and has_word(path, r"(?<!multi)(?<!multi_)head")
        return matrix and not head and not has_word(path, "embed", "norm", "bias")

    return jax.tree_util.tree_map_with_path(is_matrix, layer_ndims(params))


def muon(
    momentum=0.95,
    nesterov=True,
    ns_steps=5,
    consistent_rms=0.2,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    matrices=muon_matrices,
):
    """Returns the direction of Muon for matrices and Adam for the rest; see `make_optimizer`."""

    def rescale(update):
        fan_in, fan_out = update.shape[-2:]
        if consistent_rms is None:
            return update * max(1, fan_out / max(1, fan_in)) ** 0.5  # a matrix may have no rows
        return update * (consistent_rms * max(fan_in, fan_out) ** 0.5)

    muon = optax.chain(
        _orthogonal_momentum(momentum, nesterov, ns_steps, eps),
        optax.stateless(lambda updates, params: jax.tree.map(rescale, updates)),
    )
    both = optax.partition(
        {True: muon, False: optax.scale_by_adam(b1=b1, b2=b2, eps=eps)},
        lambda params: like_params("make_optimizer('muon'): matrices", matrices(params), params),
        mask_compatible_extra_args=True,
    )
    return Placed(both.init, both.update)


class Placed(optax.GradientTransformationExtraArgs):
    """A transformation whose update takes `places`: NamedShardings of the parameters, or None for unknown ones."""


def _orthogonal_momentum(momentum, nesterov, ns_steps, eps) -> optax.GradientTransformationExtraArgs:
    """Returns `optax.contrib.scale_by_muon`, with its state, but that each device orthogonalises whole matrices."""

    # without momentum it only orthogonalises
    of_matrix = optax.contrib.scale_by_muon(ns_steps=ns_steps, beta=0.0, nesterov=False, eps=eps)

    def orthogonal(matrix):
        return of_matrix.update(matrix, of_matrix.init(matrix))[0]

    def update(updates, state, params=None, *, places=None, **_):
        mean = optax.tree.update_moment(updates, state.mu, momentum, 1)
        count = optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mean, momentum, optax.safe_increment(count) if nesterov else count)
        if nesterov:
            newest = optax.tree.bias_correction(updates, momentum, count)
            ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, ahead, newest)
        places = jax.tree.map(lambda _: None, ahead) if places is None else places
        found = jax.tree.map(lambda x, place: _each(orthogonal, x, place), ahead, places)
        return found, state._replace(count=count, mu=mean)

    return optax.GradientTransformationExtraArgs(of_matrix.init, update)


def _each(function: Callable, x: jax.Array, place: NamedSharding | None) -> jax.Array:
    """Applies a function of a matrix to all of [..., rows, columns], where places are known to whole ones."""
    for _ in range(x.ndim - 3):
        function = jax.vmap(function)
    if x.ndim == 2:
        return function(x)
    return jax.vmap(function)(x) if place is None else map_whole_layers(function, x, place)
