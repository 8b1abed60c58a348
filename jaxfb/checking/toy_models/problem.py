"""Builds what a case runs: the model, its parameters and the rows of one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import numpy as np

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.draw import NUM_DEVICES, OWN_AXES, Own
from jaxfb.checking.toy_models import modules, toys
from jaxfb.forward_backward.sequential import num_layers
from jaxfb.refusal import Refused
from jaxfb.types import LossFn, Pipelined

PyTree = Any
OwnModel = tuple[LossFn | Pipelined, PyTree, PyTree]
"""The (model, params, batch) of a user."""


@dataclass(frozen=True)
class Problem:
    """Groups a model (a loss function or a `Pipelined`), its params, and a batch of numpy arrays [rows, ...]."""

    model: LossFn | Pipelined
    params: PyTree
    batch: PyTree


def problem_of(case: Case, own: OwnModel | None = None) -> Problem:
    """Builds the problem of a case; `own` for a case whose model is "own"."""
    if own is not None and case.model == "own":
        model, *trees = own
        return Problem(model, *(modules.cast(case, tree) for tree in trees))
    if case.model in ("stages", "loss"):
        model = toys.stages(case) if case.model == "stages" else toys.loss_fn(case)
        return Problem(model, toys.params_of(case), toys.batch_of(case))
    if case.model in ("transformer", "moe"):
        return Problem(*modules.built_in(case), modules.built_in_batch(case))
    if case.model == "sums":
        return Problem(*modules.sums(case), modules.sums_batch(case))
    build: Callable[[Case], tuple[LossFn | Pipelined, PyTree]] = getattr(modules, case.model)
    return Problem(*build(case), toys.batch_of(case))


def load(name: str) -> OwnModel:
    """Returns the (model, params, batch) that `module:function` returns.

    Raises:
      ValueError: there is no such function, or it returns something else.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise Refused(f"[check] --model must be module:function, such as my_model:small, got {name!r}")
    try:
        build = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise Refused(
            f"--model {name}: no module named {error.name!r}; run this where it can be imported, "
            "or add its directory to PYTHONPATH"
        ) from None
    if not callable(build):
        raise Refused(f"--model {name}: module {module} has no function {function!r}")
    return check_own(build(), name)


def check_own(own: Any, name: str) -> OwnModel:
    """Returns the triple, if it is one.

    Raises:
      ValueError: it is something else, or the batch has no rows.
    """
    if not (isinstance(own, tuple) and len(own) == 3):
        raise Refused(
            f"{name} must give (model, params, batch), got {type(own).__name__}; return a tuple of three"
        )
    model, _, batch = own
    if not (isinstance(model, Pipelined) or callable(model)):
        raise Refused(
            f"{name}: model must be a loss function or a jaxfb.Pipelined, got {type(model).__name__}"
        )
    leaves = jax.tree.leaves(batch)
    if not leaves or not all(np.shape(leaf)[:1] == np.shape(leaves[0])[:1] != () for leaf in leaves):
        shapes = [np.shape(leaf) for leaf in leaves]
        raise Refused(
            f"{name}: every leaf of the batch must be [rows, ...] of as many rows, got shapes {shapes}"
        )
    return own


def facts(own: OwnModel, axes: Sequence[str] | None = None, num_devices: int = NUM_DEVICES) -> Own:
    """Describes a user's model to the draw."""
    model, params, batch = own
    layers = num_layers(params) if isinstance(model, Pipelined) else None
    axes = OWN_AXES if axes is None else tuple(axes)
    return Own(len(jax.tree.leaves(batch)[0]), layers, axes, num_devices)
