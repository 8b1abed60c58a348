"""The optional members of `Pipelined`: whether a model has them, and what calls that need one ask of it."""

from __future__ import annotations

from typing import Any

import jax

from jaxfb.refusal import Refused
from jaxfb.types import Counted, LossFn, Pipelined, PyTree


def counted_of(model: LossFn | Pipelined) -> Counted | None:
    """Returns which leaves the model makes by counting; None where it has none, as a loss function."""
    return model.counted if isinstance(model, Pipelined) else None


def counts_before(model: LossFn | Pipelined) -> bool:
    """Returns whether the model reads statistics of the whole global batch before its backward."""
    counted = counted_of(model)
    return counted is not None and counted.before is not None


def check_parts(model: LossFn | Pipelined, microbatches: PyTree, parts_of_each: int) -> None:
    """Asks the model's own `check` whether its head can be split into so many parts of each microbatch.

    Raises:
      ValueError: it cannot.
    """
    if isinstance(model, Pipelined) and model.check is not None:
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), microbatches)
        model.check(rows, parts_of_each * jax.tree.leaves(microbatches)[0].shape[0])


def check_offers_pieces(model: Any, num_pieces: int) -> None:
    """Raises ValueError for a model that cannot run a sequence in several pieces."""
    if num_pieces == 1 or (isinstance(model, Pipelined) and model.layer_piece is not None):
        return
    raise Refused(
        f"num_pieces={num_pieces} needs a model with Pipelined.layer_piece, this one has none; the built-in "
        "transformer has it for its own loss, without dropout, experts, multi-token prediction, longrope and leading "
        "layers; use num_pieces=1",
        [{"num_pieces": 1, "schedule": None}],
    )
