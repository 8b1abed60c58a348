"""The optional members of `Pipelined`: whether a model has them, and what calls that need one ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxfb.forward_backward.arguments import leaves_of
from jaxfb.mesh import SHARD_AXES, axis_size
from jaxfb.refusal import Refused, shown
from jaxfb.types import Counted, LossFn, Pipelined, PyTree, outer_params


def counted_of(model: LossFn | Pipelined) -> Counted | None:
    """Returns which leaves the model makes by counting; None where it has none, as a loss function."""
    return model.counted if isinstance(model, Pipelined) else None


def counts_before(model: LossFn | Pipelined) -> bool:
    """Returns whether the model reads statistics of the whole global batch before its backward."""
    counted = counted_of(model)
    return counted is not None and counted.before is not None


def check_marks(model: Pipelined, params: PyTree, mesh: Mesh) -> None:
    """Raises ValueError where a member of the model that marks parameters gives no tree like them, or wrong marks.

    Only members that a call on this mesh reads are called. params: a plain dict.
    """
    outer = outer_params(params)
    if model.counted is not None:
        _check_flags("Pipelined.counted.leaves", model.counted.leaves(params), params)
    if model.vocabulary is not None and axis_size(mesh, "pipe") > 1:
        _check_dims("Pipelined.vocabulary.dims", model.vocabulary.dims(outer), outer)
        if (shared := model.vocabulary.shared) is not None:
            _check_flags("Pipelined.vocabulary.shared", shared(outer), outer)
    if model.tables is not None and axis_size(mesh, *SHARD_AXES) > 1:
        _check_dims("Pipelined.tables", model.tables(outer), outer)


def _check_dims(who: str, given: PyTree, outer: PyTree) -> None:
    def is_dim(mark: Any, leaf: Any) -> bool:
        is_integer = isinstance(mark, int | np.integer) and not isinstance(mark, bool)
        return is_integer and -1 <= int(mark) < len(leaf.shape)

    _check_each(who, given, outer, "one of its dims, or -1", "-1", is_dim)


def _check_flags(who: str, given: PyTree, like: PyTree) -> None:
    def is_flag(mark: Any, _: Any) -> bool:
        return isinstance(mark, bool | np.bool_ | int | np.integer)

    _check_each(who, given, like, "True or False", "False", is_flag)


def _check_each(
    who: str, given: PyTree, like: PyTree, what: str, usual: str, is_right: Callable[[Any, Any], bool]
) -> None:
    """Raises ValueError unless `given` is a tree like the parameters with a mark for each.

    what: a mark may be, in words. usual: that of most parameters. is_right: (mark, parameter) -> whether it is one.
    """
    if jax.tree.structure(given) != jax.tree.structure(like):
        raise Refused(
            f"{who} must give a tree like the parameters that it is given, such as jax.tree.map(lambda _: "
            f"{usual}, given) with some leaves changed, got {shown(given)}"
        )
    for (path, leaf), mark in zip(leaves_of("params", like), jax.tree.leaves(given), strict=True):
        if not is_right(mark, leaf):
            raise Refused(
                f"{who} must give {what} for each parameter, for {jax.tree_util.keystr(path)} of shape "
                f"{tuple(leaf.shape)} it gives {shown(mark)}"
            )


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
