"""Builds the toy of the random search, as a `Pipelined` and as a plain loss function over any kind of pytree.

A row of tokens is embedded, goes through layers of one matrix each, token by token, and is scored against the
vocabulary: everything that can go wrong under a split, and nothing that takes long to compile.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.toy_models.outputs import output
from jaxfb.models.layers import dropout
from jaxfb.parallel.context import context_attention, size_here
from jaxfb.types import LossFn, LossOutput, Pipelined, Sum

PyTree = Any
VOCAB, WIDTH = 24, 12  # multiples of every size that an axis may have, but one
RATE = 0.25


class Named(NamedTuple):
    """Contains the leaves of a tree by name; None where there is none."""

    embed: Any = None
    head: Any = None
    gain: Any = None
    layers: Any = None
    w: Any = None
    b: Any = None
    empty: Any = None
    unused: Any = None
    stopped: Any = None
    scalar: Any = None


def params_of(case: Case) -> PyTree:
    """Returns parameters as numpy arrays, in the case's containers and dtypes."""
    rng = np.random.default_rng(case.data_seed)
    normal = lambda scale, *shape: rng.normal(size=shape) * scale  # noqa: E731
    layers = {"w": normal(0.3, case.num_layers, WIDTH, WIDTH), "b": normal(0.1, case.num_layers, WIDTH)}
    layers |= _unusual(case, (case.num_layers,))
    tree = {"embed": normal(1.0, VOCAB, WIDTH), "gain": np.ones(3)} | _unusual(case, ())
    if not case.tied:
        tree["head"] = normal(0.5, WIDTH, VOCAB)
    tree, layers = _cast(case, tree), contained(case.container, _cast(case, layers))
    if case.model == "stages":  # whose parameters are a dict, of whatever kind
        return contained("ordered" if case.container == "ordered" else "dict", tree | {"layers": layers})
    return contained(case.container, tree | {"layers": layers})


def batch_of(case: Case) -> dict[str, np.ndarray]:
    """Returns tokens, which of them count, a weight and a number a row, and a factor of the loss."""
    rng = np.random.default_rng(case.data_seed + 1)
    shape = (case.rows, case.length)
    mask = np.ones(shape) if case.masks == "full" else (rng.random(shape) > 0.4).astype(np.float64)
    counts = np.ones(case.rows)
    if case.masks == "empty":
        counts[:] = 0
    elif case.masks == "empty_microbatch":
        counts[: case.rows_per_global_microbatch] = 0
    wide = np.float64 if case.param_dtype == "float64" else np.float32
    return {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "mask": (mask * counts[:, None]).astype(wide),
        "weight": (rng.random(case.rows) * counts).astype(wide),
        "scale": np.ones(case.rows, wide),
        "row": np.arange(case.rows, dtype=np.int32),
    }


def stages(case: Case) -> Pipelined:
    """Returns the toy cut for stages."""

    def embed(outer, microbatch, rng):
        return named(outer)["embed"][microbatch["tokens"]]

    def layer(weights, hidden, microbatch, rng):
        hidden = run_layer(case, weights, hidden, rng)
        if not (case.layer_terms or case.layer_metrics):
            return hidden
        return hidden, _of_layer(case, hidden, microbatch)

    def head(outer, hidden, microbatch, rng):
        return score(case, outer, hidden, microbatch)

    return Pipelined(embed, layer, head, param_specs=tensor_specs if case.tensor_specs else None)


def loss_fn(case: Case) -> LossFn:
    """Returns the toy as one function."""

    def loss(params, microbatch, rng):
        params = named(params)
        hidden, layers = params["embed"][microbatch["tokens"]], named(params["layers"])
        for index in range(case.num_layers):
            weights = {name: leaf[index] for name, leaf in layers.items()}
            keys = None if rng is None else jax.vmap(jax.random.fold_in, (0, None))(rng, index)
            hidden = run_layer(case, weights, hidden, keys)
        return score(case, params, hidden, microbatch)

    return loss


def run_layer(case: Case, weights: PyTree, hidden: jax.Array, keys: jax.Array | None) -> jax.Array:
    """Runs one layer: [R, T, W] -> the same."""
    weights = named(weights)
    if case.attention:
        hidden = hidden + attended(case.attention, hidden)
    mixed = jnp.tanh(hidden @ weights["w"] + weights["b"])
    if "stopped" in case.leaves:
        mixed = mixed * lax.stop_gradient(weights["stopped"])
    if "scalar" in case.leaves:
        mixed = mixed * weights["scalar"]
    return dropout(hidden + mixed, RATE if case.dropout else 0.0, keys, site=0).astype(hidden.dtype)


def attended(method: str, hidden: jax.Array) -> jax.Array:
    """Computes causal attention of every token's width to itself, one number a head: [R, T, W] -> the same.

    Its inputs are at most 1: of large ones softmax is nearly a step, where 16 bits decide between two tokens.
    """
    hidden = jnp.tanh(hidden)
    x = hidden[..., None]
    if size_here() > 1:
        return context_attention(x, x, x, segments=None, method=method)[..., 0]
    scores = jnp.einsum("rtw,rsw->rwts", hidden, hidden)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("rwts,rsw->rtw", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), hidden)


def score(case: Case, outer: PyTree, hidden: jax.Array, microbatch: dict) -> LossOutput:
    """Computes the logits of hidden [R, T, W], and what the loss function returns of them."""
    outer = named(outer)
    kernel = outer["embed"].T if case.tied else outer["head"]
    gain = outer["gain"]
    if "stopped" in case.leaves:
        gain = gain * lax.stop_gradient(outer["stopped"])[0]
    if "scalar" in case.leaves:
        gain = gain * outer["scalar"]
    return output(case, hidden @ kernel, hidden, microbatch, gain)


def named(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of any of the containers, by name."""
    if isinstance(tree, Named):
        return {name: leaf for name, leaf in tree._asdict().items() if leaf is not None}
    if isinstance(tree, list):
        return {next(iter(pair)): next(iter(pair.values())) for pair in tree}
    return tree


def contained(container: str, tree: dict[str, Any]) -> PyTree:
    """Puts a dict's leaves into a container of that kind."""
    if container == "ordered":
        return OrderedDict(reversed(tree.items()))
    if container == "namedtuple":
        return Named(**tree)
    return [{name: leaf} for name, leaf in tree.items()] if container == "list" else tree


def _unusual(case: Case, stack: tuple[int, ...]) -> dict[str, np.ndarray]:
    made = {
        "empty": np.zeros((*stack, 0, WIDTH)),
        "unused": np.ones((*stack, WIDTH, WIDTH)),
        "stopped": np.linspace(0.5, 1.5, WIDTH) * np.ones((*stack, WIDTH)),
        "scalar": np.full(stack, 0.9),
    }
    return {name: made[name] for name in case.leaves}


def _cast(case: Case, tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    vectors = jnp.dtype("float32" if case.mixed else case.param_dtype)
    matrices = ("w", "embed", "head", "unused")
    return {
        name: x.astype(jnp.dtype(case.param_dtype) if name in matrices else vectors)
        for name, x in tree.items()
    }


def _of_layer(case: Case, hidden: jax.Array, microbatch: dict) -> dict[str, Sum] | LossOutput:
    mask = microbatch["mask"]
    squares = jnp.where(mask[..., None] > 0, hidden.astype(mask.dtype) ** 2, 0)
    terms = {"balance": Sum(0.1 * squares.sum(), mask.sum())} if case.layer_terms else {}
    if not case.layer_metrics:
        return terms
    metrics = {
        "layer_mean": Sum(squares.sum(), mask.sum()),
        "layer_vector": Sum(squares.sum((0, 1))[:3], mask.sum()),
    }
    return LossOutput(terms, metrics)


def tensor_specs(params: PyTree) -> PyTree:
    """Cuts layers' matrices by columns and their vectors with them, the two tables by vocabulary."""

    def of(path, leaf):
        dims = {"w": 2, "b": 1, "embed": 0, "head": 1}
        name = jax.tree_util.keystr(path[-1:], simple=True)
        entries = [None] * leaf.ndim
        if name in dims:
            entries[dims[name]] = "tensor"
        return P(*entries)

    return jax.tree_util.tree_map_with_path(of, params)
