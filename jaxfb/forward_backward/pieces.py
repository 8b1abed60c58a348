"""Cuts microbatches into pieces of their sequences, and makes records of microbatches from those of their pieces."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxfb.forward_backward.loss import as_loss_output
from jaxfb.forward_backward.reduce import of_all
from jaxfb.forward_backward.traced import Traced, is_constant, reads_none
from jaxfb.refusal import Refused
from jaxfb.types import LossOutput, PyTree, Sum


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
