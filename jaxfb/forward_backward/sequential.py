"""A `Pipelined` model without a pipeline: embed, a scan over the layers, head, as one loss function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.forward_backward.arguments import leaves_of
from jaxfb.forward_backward.loss_function.loss import as_loss_output, as_metric, as_term, checked
from jaxfb.parallel.annotations import unconstrained
from jaxfb.refusal import Refused, shown
from jaxfb.types import Last, LossFn, LossOutput, Max, Min, Pipelined, PyTree, Sum, outer_params

Gather = Callable[[PyTree], PyTree]


def as_is(tree: PyTree) -> PyTree:
    """Returns the tree: parameters that are whole already."""
    return tree


def sequential(
    model: Pipelined,
    remats: Sequence[tuple[Callable, int | None]] = ((lambda layer: layer, None),),
    gather_outer: Gather = as_is,
    gather_layer: Gather = as_is,
) -> LossFn:
    """Returns the model as `loss_fn(params, microbatch, rng)`; the layers' own terms are summed over layers, metrics
    stacked.

    Args:
      remats: what wraps the function of one layer, such as `jax.checkpoint` with a policy, and the number of layers
        that it is for, in their order; None: the rest.
      gather_outer, gather_layer: make whole parameters out of shards where they are used (FSDP).
    """

    def run_layer(shards, hidden, microbatch, rng):
        return layer_output(model.layer(gather_layer(shards), hidden, microbatch, rng))

    def loss_fn(params, microbatch, rng) -> LossOutput:
        outer = gather_outer(outer_params(params))
        with jax.named_scope("embed"):
            hidden = as_hidden("embed", model.embed(outer, microbatch, rng), rows_of(microbatch))

        def steps(run):
            return lambda hidden, inputs: run(inputs[1], hidden, microbatch, layer_keys(rng, inputs[0]))

        _check_layer(steps(run_layer), hidden, params["layers"])
        number, first, parts = num_layers(params), 0, []
        layers = jnp.arange(number), params["layers"]
        with jax.named_scope("layers"):
            for remat, count in remats:
                end = number if count is None else first + count
                part = layers if len(remats) == 1 else _between(layers, first, end)
                hidden, stacked = lax.scan(steps(remat(run_layer)), hidden, part)
                parts.append(sum_of_layers(stacked))
                first = end
        with jax.named_scope("head"):
            out = as_loss_output(model.head(outer, hidden, microbatch, rng))
        return with_layers(out, joined_parts(parts))

    return loss_fn


def as_loss_fn(model: LossFn | Pipelined) -> LossFn:
    """Returns the model as one loss function that returns a checked LossOutput."""
    if isinstance(model, Pipelined):
        return checked(sequential(model))
    return checked(lambda params, *rest: model(unconstrained(params), *rest))


def num_layers(params: dict) -> int:
    """Returns the length of the stacked layer dim.

    Raises:
      ValueError: params has no "layers", or its leaves are stacked to different lengths, or to none.
    """
    if not isinstance(params, Mapping) or "layers" not in params or not jax.tree.leaves(params["layers"]):
        raise Refused(
            'params of a Pipelined model must be a dict with "layers", every leaf [num_layers, ...]'
        )
    lengths = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(params["layers"])}
    if len(lengths) > 1 or 0 in lengths:
        raise Refused(
            f'every leaf of params["layers"] must be stacked to one num_layers, 1 or more, got {sorted(lengths)}'
        )
    return lengths.pop()


def layer_keys(rng: jax.Array | None, index: jax.Array) -> jax.Array | None:
    """Returns the row keys of one layer: each row's key folded with the index of the layer in the whole model."""
    return None if rng is None else jax.vmap(jax.random.fold_in, (0, None))(rng, index)


def layer_output(out: Any) -> tuple[PyTree, LossOutput]:
    """Splits what a layer returned into (hidden, its terms and metrics)."""
    if not (isinstance(out, tuple) and len(out) == 2):
        return as_hidden("layer", out), LossOutput({})
    hidden, reported = out
    if isinstance(reported, dict) and (not reported or any(isinstance(t, Sum) for t in reported.values())):
        reported = LossOutput(reported)
    if not isinstance(reported, LossOutput):
        return as_hidden("layer", out), LossOutput({})
    if jax.tree.leaves(reported.outputs):
        raise Refused(
            "a layer returns (hidden, LossOutput(terms, metrics)) without outputs, which only the head has; add them "
            "to hidden, a tree of [rows, ...] arrays that every layer hands on, and return them from the head"
        )
    terms = {name: as_term(name, term) for name, term in reported.terms.items()}
    return as_hidden("layer", hidden), LossOutput(
        terms, {name: _layer_metric(name, m) for name, m in reported.metrics.items()}
    )


def piece_output(out: Any) -> tuple[tuple[PyTree, PyTree], LossOutput]:
    """Returns what a layer returned of a piece, (hidden, own), with the terms and metrics that it cannot have."""
    hidden, own = two_results("Pipelined.layer_piece", out, "(hidden, own)")
    hidden = as_hidden("layer_piece", hidden)
    rows_and_tokens = jax.tree.leaves(hidden)[0].shape[:2]
    for path, leaf in leaves_of("what layer_piece returns as `own`", own):
        if leaf.shape[:2] != rows_and_tokens or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Refused(
                "Pipelined.layer_piece must return a tree of float arrays [rows, tokens, ...] as `own`, but "
                f"own{jax.tree_util.keystr(path)} is in {leaf.dtype} and of shape {leaf.shape}"
            )
    return (hidden, own), LossOutput({})


def two_results(who: str, out: Any, which: str) -> tuple[Any, Any]:
    """Returns what a function of the model has returned, if that is two results; which: what they are."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    raise Refused(f"{who} must return two results, {which}, got {shown(out)}")


def as_hidden(what: str, hidden: PyTree, rows: int | None = None) -> PyTree:
    """Returns `hidden` itself if it is a tree of arrays of numbers, [rows, ...] where rows is given.

    Raises:
      ValueError: it is not; the sentence tells which of the model's functions gave it.
    """
    leaves = leaves_of(f"what {what} returns", hidden)
    if not leaves:
        raise Refused(f"{what} must return hidden, a tree of arrays [rows, ...], got {shown(hidden)}")
    for path, leaf in leaves:
        is_array = (
            isinstance(leaf, jax.Array | np.ndarray) and getattr(leaf.dtype, "kind", "V") not in "OSUMm"
        )
        if not is_array or rows not in (None, *leaf.shape[:1]):
            given = f"shape {leaf.shape}" if is_array else shown(leaf)
            raise Refused(
                f"{what} must return hidden, a tree of arrays [rows, ...]{f' of {rows} rows' * (rows is not None)}, "
                f"hidden{jax.tree_util.keystr(path)} is {given}"
            )
    return hidden


def rows_of(microbatch: PyTree) -> int:
    """Returns the number of rows of a microbatch."""
    return jax.tree.leaves(microbatch)[0].shape[0]


def sum_of_layers(stacked: LossOutput) -> LossOutput:
    """Sums terms [layers]; metrics stay [layers, ...]."""
    return LossOutput(jax.tree.map(lambda per_layer: per_layer.sum(0), stacked.terms), stacked.metrics)


def joined_parts(parts: Sequence[LossOutput]) -> LossOutput:
    """Returns the sum of the terms of several runs of layers, and their metrics [layers, ...] one after the other."""
    if len(parts) == 1:
        return parts[0]
    terms = jax.tree.map(lambda *of_parts: sum(of_parts), *(part.terms for part in parts))
    metrics = jax.tree.map(lambda *of_parts: jnp.concatenate(of_parts), *(part.metrics for part in parts))
    return LossOutput(terms, metrics)


def with_layers(out: LossOutput, layers: LossOutput) -> LossOutput:
    """Returns the head's output together with the layers' terms and metrics."""
    for kind, ours, theirs in (("term", out.terms, layers.terms), ("metric", out.metrics, layers.metrics)):
        if both := sorted(set(ours) & set(theirs)):
            raise Refused(
                f"the head and the layers both return a {kind} named {both[0]!r}; rename one of them"
            )
    return LossOutput({**out.terms, **layers.terms}, {**out.metrics, **layers.metrics}, out.outputs)


def _layer_metric(name: str, metric: Any) -> Sum | Max | Min | Last:
    if not isinstance(metric, Sum):
        raise Refused(f"a layer's metric must be a jaxfb.Sum, {name!r} is a {type(metric).__name__}")
    return as_metric(name, metric)


def _between(layers: PyTree, first: int, end: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[first:end], layers)


def _check_layer(step: Callable, hidden: PyTree, layers: PyTree) -> None:
    one = jax.tree.map(lambda leaf: leaf[0], layers)
    after = jax.eval_shape(lambda h, p: step(h, (jnp.int32(0), p))[0], hidden, one)
    before = jax.eval_shape(lambda h: h, hidden)
    describe = lambda tree: jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)  # noqa: E731
    if describe(before) != describe(after):
        raise Refused(
            f"a layer must return hidden with the shapes and dtypes it was given: "
            f"embed gives {describe(before)}, layer gives {describe(after)}"
        )
