"""Cuts microbatches into pieces of their sequences, and makes records of microbatches from those of their pieces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.forward_backward.loss_function.loss import as_loss_output
from jaxfb.forward_backward.loss_function.padding import MOST, other_leaf, some_keys
from jaxfb.forward_backward.loss_function.traced import Traced, is_constant, reads_none
from jaxfb.forward_backward.reduce import of_all
from jaxfb.refusal import Refused
from jaxfb.types import LossOutput, Pipelined, PyTree, Sum, outer_params

ROUNDING = 0.05
"""How far numbers of pieces may be from those of whole sequences, relative to their size, in any dtype."""


def check_lengths(microbatches: PyTree, num_pieces: int) -> None:
    """Raises ValueError unless leaves [num_microbatches, rows, length, ...] have one length, which divides."""
    if num_pieces == 1:
        return
    lengths = {leaf.shape[2] for leaf in jax.tree.leaves(microbatches) if leaf.ndim > 2}
    if len(lengths) != 1:
        raise Refused(
            f"num_pieces={num_pieces} cuts each leaf [rows, length, ...] of a batch along its length, which must be "
            f"the same for all; got lengths {sorted(lengths)}"
        )
    length = lengths.pop()
    if length % num_pieces:
        nearest = min((n for n in range(1, length + 1) if length % n == 0), key=lambda n: abs(n - num_pieces))
        raise Refused(
            f"num_pieces={num_pieces} cuts sequences of {length} tokens into equal pieces, which does not divide; use "
            f"num_pieces={nearest}",
            [{"num_pieces": nearest}],
        )


def check_outputs(outputs: PyTree, piece: PyTree) -> None:
    """Raises ValueError for an output that is not of tokens; piece: a microbatch's, leaves [rows, tokens, ...]."""
    tokens = next(leaf.shape[1] for leaf in jax.tree.leaves(piece) if leaf.ndim > 1)
    for leaf in jax.tree.leaves(outputs):
        if leaf.ndim < 2 or leaf.shape[1] != tokens:
            raise Refused(
                f"with num_pieces of 2 or more an output must be of tokens, [rows, {tokens}, ...] for a piece of "
                f"{tokens}, got shape {leaf.shape}; sum over the sequence outside the model"
            )


def check_terms(head: Callable, outer: PyTree, hidden: PyTree, inputs: PyTree, num_pieces: int) -> None:
    """Raises ValueError for a term or metric of which something reads no token, which each piece would count.

    A constant weight that grows with the tokens is that of a sum over tokens of what is the same for each.

    Args:
      head: (outer, hidden, *inputs) -> its LossOutput.
      hidden, inputs: shapes for a piece; leaves [rows, tokens, ...] and [rows].
    """
    tokens = [len(leaf.shape) > 1 for leaf in jax.tree.leaves((hidden, inputs))]

    def traced(times: int) -> Traced:
        def more(leaf):
            return leaf if len(leaf.shape) < 2 else leaf.update(shape=_longer(leaf.shape, times))

        data = jax.tree.map(more, (hidden, inputs))
        return Traced(
            lambda outer, data, _: as_loss_output(head(outer, data[0], *data[1])), outer, data, None
        )

    piece, whole = traced(1), traced(num_pieces)
    for name, term in piece.places.terms.items():
        if any(used and one for used, one in zip(piece.reads(term.total)[1], tokens, strict=True)):
            if reads_none(piece, whole, term.total, tokens):
                raise _counted_by_each("term", name, num_pieces)
            continue
        of_all_tokens = whole.places.terms[name].weight
        if None not in (term.weight, of_all_tokens) and not any(piece.reads(term.weight)[1]):
            if not is_constant(piece, whole, term.weight, of_all_tokens):
                continue
        raise _counted_by_each("term", name, num_pieces)
    for name, metric in piece.places.metrics.items():
        for place in jax.tree.leaves(metric) if isinstance(metric, Sum) else ():
            if reads_none(piece, whole, place, tokens):
                raise _counted_by_each("metric", name, num_pieces)


def warn_of_places(
    model: Pipelined, params: PyTree, microbatches: PyTree, keys: PyTree, num_pieces: int
) -> None:
    """Warns if the embedding or the head gives other results for pieces than for whole sequences.

    Both are compared with random parameters and hidden states, unless the model is too large.

    Args:
      params, microbatches, keys: arrays or shapes; no value is read.
    """
    one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    microbatch, rng = jax.tree.map(one, (microbatches, keys))
    positions = max((leaf.size for leaf in jax.tree.leaves(microbatch)), default=1)
    if num_pieces == 1 or 2 * positions * sum(leaf.size for leaf in jax.tree.leaves(params)) > MOST:
        return
    found = []
    with suppress(Exception):  # what fails here fails again where it is computed
        found = _of_other_places(model, outer_params(params), microbatch, rng, num_pieces)
    if found:
        warnings.warn(
            f"with num_pieces={num_pieces}, pieces give another {' and another '.join(found)} than whole sequences: a "
            "function that reads a token's place, draws random numbers or divides by what a sequence counts gives "
            "another result for a piece (docs/pipeline.md, Pieces of sequences)",
            stacklevel=2,
        )


def _of_other_places(
    model: Pipelined, outer: PyTree, microbatch: PyTree, rng: PyTree, num_pieces: int
) -> list[str]:
    """Returns which of "embedding" and "loss" (the terms of the head) differ between pieces and whole sequences."""
    draw = np.random.default_rng(0)

    def numbers(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(draw.normal(size=leaf.shape), jnp.promote_types(leaf.dtype, jnp.float32))

    def pieces(tree: PyTree) -> list[PyTree]:
        return [piece_of(tree, jnp.int32(number), num_pieces) for number in range(num_pieces)]

    def head(hidden: PyTree, microbatch: PyTree) -> PyTree:
        return as_loss_output(jax.jit(model.head)(outer, hidden, microbatch, rng)).terms

    with jax.ensure_compile_time_eval():
        outer, whole, rng = jax.tree.map(numbers, outer), jax.tree.map(other_leaf, microbatch), some_keys(rng)
        hidden = jax.jit(model.embed)(outer, whole, rng)
        parts = [jax.jit(model.embed)(outer, piece, rng) for piece in pieces(whole)]
        joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, 1), *parts)
        found = ["embedding"] if _differ(hidden, joined) else []
        hidden = jax.tree.map(numbers, hidden)
        terms = [head(*both) for both in zip(pieces(hidden), pieces(whole), strict=True)]
        added = jax.tree.map(lambda *leaves: sum(leaves), *terms)
        return [*found, "loss"] if _differ(head(hidden, whole), added) else found


def _differ(one: PyTree, other: PyTree) -> bool:
    """Returns whether numbers, all of them finite, differ by more than rounding."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        apart = np.abs(a - b).max(initial=0)
        if np.isfinite(apart) and apart > ROUNDING * np.abs(a).max(initial=0):
            return True
    return False


def _counted_by_each(kind: str, name: str, num_pieces: int) -> Refused:
    return Refused(
        f"with num_pieces={num_pieces} a {kind} of the head must be a sum over tokens, but {name!r} has something that "
        "reads none, so that each piece would count it; use num_pieces=1, leave a penalty to the optimizer, as weight "
        "decay, or give a metric no constant weight",
        [{"num_pieces": 1, "schedule": None}],
    )


def _longer(shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    rows, tokens, *rest = shape
    return (rows, tokens * times, *rest)


def piece_of(microbatch: PyTree, number: jax.Array, num_pieces: int) -> PyTree:
    """Returns the tokens of one piece, [rows, length / num_pieces, ...], of leaves [rows, length, ...]; leaves [rows]
    are whole.
    """

    def cut(leaf):
        if leaf.ndim < 2:
            return leaf
        size = leaf.shape[1] // num_pieces
        return lax.dynamic_slice_in_dim(leaf, number * size, size, axis=1)

    return jax.tree.map(cut, microbatch)


def whole_records(records: LossOutput, num_pieces: int) -> LossOutput:
    """Returns records of microbatches, [num_microbatches, ...] leaves, from those of their pieces, in order."""
    by_piece = jax.tree.map(lambda leaf: leaf.reshape(-1, num_pieces, *leaf.shape[1:]), records)
    terms = {name: of_all(one, axis=1) for name, one in by_piece.terms.items()}
    metrics = {name: of_all(one, axis=1) for name, one in by_piece.metrics.items()}
    return LossOutput(terms, metrics, jax.tree.map(_joined_tokens, by_piece.outputs))


def _joined_tokens(leaf: jax.Array) -> jax.Array:
    """Returns [num_microbatches, rows, length, ...] of [num_microbatches, num_pieces, rows, tokens of a piece, ...]."""
    microbatches, _, rows, *rest = leaf.shape
    return leaf.swapaxes(1, 2).reshape(microbatches, rows, -1, *rest[1:])
