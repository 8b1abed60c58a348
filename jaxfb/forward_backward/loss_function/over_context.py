"""Decides which results of a loss function are partial on a context axis, and which are the same on all its devices.

A loss function that communicates along the axis is run on each device's tokens. What it computes from them is partial:
totals, weights and outputs of rows are summed over the axis, outputs of tokens are put together. What reads no token is
the same on all devices and counts once. A loss function that does not communicate cannot know that its sequences are
cut, so it is run on whole ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxfb.forward_backward.loss_function.traced import Traced, constant, reads_none
from jaxfb.forward_backward.reduce import across, masked
from jaxfb.mesh import axis_size, data_parallel
from jaxfb.refusal import Refused
from jaxfb.types import LossFn, LossOutput, PyTree, Sum

AXIS = "context"


def traced_on_mesh(
    loss_fn: LossFn, mesh: Mesh, params: PyTree, whole_params: PyTree, microbatches: PyTree, keys: Any
) -> tuple[Traced, OverContext | None]:
    """Traces the loss function of one microbatch as each device of the mesh runs it.

    Args:
      params, whole_params: abstract parameters as a device of this mesh and as a device without one sees them.
      microbatches, keys: of all replicas; no value is read.
    Returns:
      The loss function of this device's tokens and how its results are combined; or the loss function of whole
      sequences and None, where there is no context axis or the function does not communicate along it.
    """
    one = partial(_one_microbatch, (microbatches, keys), data_parallel(mesh))
    size = axis_size(mesh, AXIS)
    if size == 1:
        return Traced.inside(mesh, loss_fn, params, *one(1)), None
    try:
        complete = Traced.inside(mesh, loss_fn, params, *one(1))
    except Exception:  # it may need cut sequences; a function that is broken fails again below
        complete = None
    if complete is not None and not complete.names(AXIS):
        warnings.warn(
            f"the loss function does not communicate along the context axis, so all {size} devices of it compute whole "
            "sequences; use jaxfb.parallel.context for attention and other functions that read several tokens",
            stacklevel=2,
        )
        return complete, None
    local = Traced.inside(mesh, loss_fn, params, *one(size))
    try:
        complete = Traced(loss_fn, whole_params, *one(1))
    except NameError:  # raised for an axis name outside of a mesh
        if complete is None:
            raise
    return local, OverContext.of(local, complete, microbatches, size)


def _one_microbatch(given: PyTree, replicas: int, parts_of_sequences: int) -> PyTree:
    """Returns the shapes of one microbatch and its keys on one replica."""

    def one(leaf):
        rows, length, rest = leaf.shape[1] // replicas, leaf.shape[2:3], leaf.shape[3:]
        return jax.ShapeDtypeStruct((rows, *(n // parts_of_sequences for n in length), *rest), leaf.dtype)

    return jax.tree.map(one, given)


@dataclass(frozen=True)
class OverContext:
    """Combines the results of the devices of the axis.

    whole:  the loss function of whole sequences.
    shared: a LossOutput of bool: results that are the same on all devices, and count once.
    tokens: tree of bool like the outputs: those of tokens, [rows, length / devices, ...].
    constants: what whole sequences give for leaves of the metrics that read nothing, such as a number of tokens, by
      their number among the leaves.
    """

    whole: Traced
    shared: LossOutput
    tokens: PyTree
    constants: dict[int, np.ndarray]

    @classmethod
    def of(cls, local: Traced, whole: Traced, microbatches: PyTree, size: int) -> OverContext:
        """Compares the loss function traced for this device's tokens with that for whole sequences.

        size: of the axis.
        microbatches: leaves [num_microbatches, rows, length, ...], which are cut, and [num_microbatches, rows].

        Raises:
          ValueError: random numbers are drawn for this device's tokens, or tokens are not an output's second dim.
        """
        leaves = jax.tree.leaves(microbatches)
        cuts = [leaf.ndim > 2 for leaf in leaves]
        _check_draws(local, whole, length=next(leaf.shape[2] for leaf in leaves if leaf.ndim > 2))

        def is_shared(place):
            reads = any(used for used, is_cut in zip(local.reads(place)[1], cuts, strict=False) if is_cut)
            return not reads and not local.names(AXIS, place)

        outputs = local.shape.outputs, whole.shape.outputs
        tokens = jax.tree.map(lambda a, b: _is_of_tokens(a.shape, b.shape), *outputs)
        shared = jax.tree.map(is_shared, local.places)
        is_data = [*cuts, *[False] * (local.num_inputs - local.num_params - len(cuts))]
        for name in ("terms", "metrics"):
            _check_sums(getattr(local.places, name), local, whole, is_data)
        terms, metrics = (
            _without_growing(getattr(shared, name), local, whole, name, is_data, size)
            for name in ("terms", "metrics")
        )
        return cls(whole, replace(shared, terms=terms, metrics=metrics), tokens, _constants(local, whole))

    def seeds(self, seeds: dict) -> dict:
        """Returns the cotangents of totals; that of a total that is the same on all devices is 0 on all but one."""
        return {name: _once(seed, self.shared.terms[name].total) for name, seed in seeds.items()}

    def combined(self, out: LossOutput) -> LossOutput:
        """Returns the results for sums over the axis: what is the same on all devices is 0 on all but one."""
        leaves, structure = jax.tree.flatten(out.metrics)
        for number, value in self.constants.items():
            leaves[number] = jnp.broadcast_to(jnp.asarray(value, leaves[number].dtype), leaves[number].shape)
        metrics = jax.tree.unflatten(structure, leaves)
        sums = {name: metric for name, metric in metrics.items() if isinstance(metric, Sum)}
        shared = {name: self.shared.metrics[name] for name in sums}
        metrics = metrics | jax.tree.map(_once, sums, shared)
        terms = jax.tree.map(_once, out.terms, self.shared.terms)
        outputs = jax.tree.map(
            lambda leaf, shared, tokens: leaf if tokens else across(lax.psum, _once(leaf, shared), (AXIS,)),
            out.outputs,
            self.shared.outputs,
            self.tokens,
        )
        return LossOutput(terms, metrics, outputs)


def _check_sums(places: Mapping, local: Traced, whole: Traced, is_data: list[bool]) -> None:
    """Raises ValueError for a sum over tokens to which something is added that reads none.

    is_data: for each leaf of the microbatch and its keys, whether it is of tokens, which the axis cuts.
    """
    for name, place in places.items():
        for part in jax.tree.leaves(place) if isinstance(place, Sum) else ():
            mixed = len(local.summands(part, is_data)) > 1
            if mixed and reads_none(local, whole, part, is_data, AXIS):
                raise Refused(
                    f"{name!r} adds something that reads no token, such as a penalty on parameters or a score of each "
                    "row, to a sum over tokens, so that each device of the context axis would count it; make it "
                    "another term or metric"
                )


def _without_growing(
    shared: Mapping, local: Traced, whole: Traced, field: str, is_data: list[bool], size: int
) -> dict:
    """Returns which results count once; not so a total that grows with the tokens, without reading one.

    Such a sum over tokens of what is the same for each is w**2 * loss.size.
    """
    found = dict(shared)
    for name, place in getattr(local.places, field).items():
        if not isinstance(place, Sum) or not shared[name].total:
            continue
        constant_metric = field == "metrics" and not any(map(any, local.reads(place.total)))
        of_whole = getattr(whole.places, field)[name].total
        same = local.summands(place.total, is_data) == whole.summands(of_whole, is_data)
        if (
            not same
            and not constant_metric
            and _grows(name, local.sample(place.total), whole.sample(of_whole), size)
        ):
            found[name] = replace(found[name], total=False)
    return found


def _grows(name: str, part: np.ndarray | None, all_tokens: np.ndarray | None, size: int) -> bool:
    """Returns whether a total that reads no token is `size` times as large for whole sequences, and not the same.

    Raises:
      ValueError: it is neither, or unknown.
    """
    if part is not None and all_tokens is not None:
        for times in (1, size):
            if np.allclose(times * part, all_tokens, rtol=1e-3, atol=0):
                return times > 1
    raise Refused(
        f"on a context axis {name!r} depends on the length of sequences, but reads no token, so it may be a sum over "
        "tokens or not; multiply it by a mask of tokens before it is summed, or make it the same for any length"
    )


def _constants(local: Traced, whole: Traced) -> dict[int, np.ndarray]:
    """Returns the metrics' leaves that read nothing, as whole sequences give them."""
    found = {}
    for number, places in enumerate(
        zip(*(jax.tree.leaves(one.places.metrics) for one in (local, whole)), strict=True)
    ):
        reads = (
            used for traced, place in zip((local, whole), places, strict=True) for used in traced.reads(place)
        )
        if not any(map(any, reads)) and not local.names(AXIS, places[0]):
            found[number] = constant(whole, places[1])
    return found


def _once(leaf: jax.Array, shared: bool) -> jax.Array:
    return masked(lax.axis_index(AXIS) == 0, leaf) if shared else leaf


def _is_of_tokens(local: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether an output grows with the sequence, which its size alone does not show."""
    grown = [dim for dim, (a, b) in enumerate(zip(local, whole, strict=True)) if a != b]
    if grown in ([], [1]):
        return bool(grown)
    raise Refused(
        "with a context axis only the second dim of an output may be the sequence, [rows, length, ...], got shape "
        f"{local} for a part of the sequence and {whole} for the whole; move that dim or sum over it"
    )


def _check_draws(local: Traced, whole: Traced, length: int) -> None:
    """Raises ValueError for random numbers that differ from those of the whole sequence."""
    here, there = local.draws(), whole.draws()
    for drawn, wanted in zip(here, there, strict=True) if len(here) == len(there) else ():
        if any(a != b and a % length for a, b in zip(drawn, wanted, strict=False)):
            raise Refused(
                f"on a context axis random numbers of shape {drawn} are drawn for a part of each sequence, so they are "
                f"not those of one device; draw them for the whole length {length} and take this device's part, "
                "jaxfb.parallel.context.own_part(drawn, dim), as jaxfb.models.layers.dropout does"
            )
