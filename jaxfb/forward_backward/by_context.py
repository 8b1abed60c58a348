"""Runs one update of rows of mixed length on meshes of the same devices whose context axes differ in size.

    groups of rows -> weights of all -> each group's program adds to every device's sums -> one reduction

Parameters and sums stay where they are: a mesh with a smaller context axis has the same devices in the same order, and
those that have other rows have the same shards of parameters as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxfb.batch_plan import BatchPlan, group_by_context
from jaxfb.forward_backward.microbatches import row_keys
from jaxfb.forward_backward.offered import counts_before
from jaxfb.forward_backward.packed import Packed, row_lengths
from jaxfb.mesh import with_context
from jaxfb.output import ForwardBackwardOutput, recorded_scale
from jaxfb.refusal import Refused
from jaxfb.types import PyTree

if TYPE_CHECKING:
    from jaxfb.forward_backward.engine import ForwardBackward


class _Part(NamedTuple):
    """The rows of one width. forward_backward: over the mesh of their context size."""

    forward_backward: ForwardBackward
    packed: Packed
    rows: np.ndarray
    keys: Any

    def call(self, model: Any, params: PyTree) -> tuple[Any, PyTree, Any, BatchPlan, Any]:
        """Returns the first arguments of the engine's functions."""
        return model, params, self.packed.batch, self.packed.plan, self.keys


def run(
    forward_backward: ForwardBackward,
    model: Any,
    params: PyTree,
    batch: dict,
    plan: BatchPlan,
    rng: Any,
    forward_only: bool,
    grad_scale: Any,
    given: dict | None,
) -> ForwardBackwardOutput:
    """Returns the output of one call over all rows; arguments as for `ForwardBackward.__call__`.

    The microbatches of its records are those of each width in turn.
    """
    parts = list(_parts(forward_backward, batch, plan, rng))
    weights = given
    if weights is None and forward_backward.options.normalize == "global":
        weights = _weights(parts, model, params)
    outs, sums = [], None
    for part in parts:
        call = part.call(model, params)
        out, sums = part.forward_backward.part(*call, forward_only, grad_scale, weights, sums)
        outs.append(replace(out, origin=replace(out.origin, rows=len(part.rows), weights=weights)))
    outputs = _in_order(parts, outs, plan.rows)
    whole = sum(replace(out, outputs=None) for out in outs)
    assert isinstance(whole, ForwardBackwardOutput)  # there is a row, so there is a part
    facts = {"grad_scale": recorded_scale(grad_scale), "weights": given, "of_tokens": None}
    origin = replace(whole.origin, rows=plan.real_rows, **facts)
    cut = _on(plan, parts[0])
    grads = None if forward_only else forward_backward.reduced(model, params, cut, sums)
    return replace(whole, grads=grads, outputs=outputs, origin=origin)


def weights(
    forward_backward: ForwardBackward, model: Any, params: PyTree, batch: dict, plan: BatchPlan, rng: Any
) -> dict[str, jax.Array]:
    """Returns the weight of each term that has one over all rows; arguments as for `ForwardBackward.weights`."""
    return _weights(list(_parts(forward_backward, batch, plan, rng)), model, params)


def _weights(parts: list[_Part], model: Any, params: PyTree) -> dict[str, jax.Array]:
    each = [part.forward_backward.weights(*part.call(model, params)) for part in parts]
    return {name: sum(weights[name] for weights in each[1:]) + each[0][name] for name in each[0]}


def _parts(forward_backward: ForwardBackward, batch: dict, plan: BatchPlan, rng: Any) -> Iterator[_Part]:
    lengths = row_lengths(batch, plan).tolist()
    keys = row_keys(rng, BatchPlan("eval", rows=plan.rows, num_microbatches=1))
    for group in group_by_context(plan, lengths):
        rows = np.array(group.rows)
        packed = Packed(jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch), group.plan)  # noqa: B023
        on_mesh = replace(forward_backward, mesh=with_context(forward_backward.mesh, group.context))
        yield _Part(on_mesh, packed, rows, packed.keys(None if keys is None else keys[rows]))


def check(normalize: str, model: Any) -> None:
    """Raises ValueError for a normalization or a model that needs all rows of an update in one program."""
    if normalize == "microbatch":
        raise Refused(
            'normalize="microbatch" divides by the number of microbatches, which max_context changes; use '
            'normalize="global", or a plan with max_context=None',
            [{"normalize": "global"}, {"max_context": None}],
        )
    if counts_before(model):
        raise Refused(
            "a model that reads statistics of the whole global batch before its backward (Counted.before) cannot run "
            "rows of several context sizes one after the other; use a plan with max_context=None",
            [{"max_context": None}],
        )


def _in_order(parts: list[_Part], outs: list[ForwardBackwardOutput], rows: int) -> PyTree:
    """Returns what was collected from the groups, [rows, ...] in the order of the update's rows."""
    restored = [part.packed.restored(out).outputs for part, out in zip(parts, outs, strict=True)]

    def whole(*leaves):
        made = np.zeros((rows, *leaves[0].shape[1:]), leaves[0].dtype)
        for part, leaf in zip(parts, leaves, strict=True):
            made[part.rows] = leaf
        return made

    return jax.tree.map(whole, *restored)


def _on(plan: BatchPlan, part: _Part) -> BatchPlan:
    """Returns a plan of the mesh with as many microbatches and rows of one as the part."""
    cut = part.packed.plan
    rows = plan.data_parallel * cut.rows_per_microbatch * cut.num_microbatches
    return cut.replace(rows=rows, data_parallel=plan.data_parallel, num_microbatches=cut.num_microbatches)
