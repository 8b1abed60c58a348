"""The functions that calls of the engine compile: a whole update, a part of one, the reduction of its parts, weights.

Each builds its `SpmdProgram` from what is resolved about the call, which is static, as are `forward_only` and names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxfb.forward_backward.loss_function.padding import check_padding
from jaxfb.forward_backward.microbatches import merge, row_keys, rows_spec, specs_of, split_keys
from jaxfb.forward_backward.offered import counts_before
from jaxfb.forward_backward.packed import is_arranged
from jaxfb.forward_backward.pipeline.pieces import warn_of_places
from jaxfb.forward_backward.resolved import Resolved, resolve
from jaxfb.forward_backward.sequential import as_loss_fn
from jaxfb.forward_backward.spmd_program import SpmdProgram
from jaxfb.output import ForwardBackwardOutput, Origin
from jaxfb.parallel import annotations, sharding
from jaxfb.platforms.compat import is_traced
from jaxfb.platforms.programs import per_options
from jaxfb.trainable import pruned
from jaxfb.types import PyTree, restrict_to


def placed(resolved: Resolved, params: PyTree, microbatches: PyTree, rng: Any) -> tuple:
    """Returns (params, microbatches, keys) where the program of a call reads them."""
    mesh, specs = resolved.mesh, resolved.specs.tree
    keys = split_keys(row_keys(sharding.automatic(rng), resolved.plan), resolved.plan)
    microbatches = sharding.adopt(microbatches, sharding.shardings(specs_of(microbatches, mesh), mesh))
    keys = sharding.adopt(keys, NamedSharding(mesh, rows_spec(mesh)))
    if not is_traced(params):
        annotations.warn_if_whole(specs, mesh)
        params = jax.tree.map(_moved, params, sharding.shardings(specs, mesh))
    return params, microbatches, keys


def adopted(resolved: Resolved, numbers: PyTree) -> PyTree:
    """Returns numbers, such as what divides each term, on the mesh of a call."""
    return sharding.adopt(numbers, NamedSharding(resolved.mesh, PartitionSpec()))


def _moved(leaf: Any, target: NamedSharding) -> jax.Array:
    """Returns a parameter that lives elsewhere, such as on one device, the host or another mesh, on the mesh."""
    if not isinstance(leaf, jax.Array) or sharding.is_elsewhere(leaf, target):
        return jax.device_put(leaf, target)
    on_another = isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh.shape != target.mesh.shape
    return jax.device_put(leaf, target) if on_another else leaf


def run(resolved, forward_only, params, microbatches, keys, grad_scale, weights) -> ForwardBackwardOutput:
    """Returns the output of a whole update."""
    model, plan, complete = resolved.model, resolved.plan, params
    _check_padding(resolved, forward_only, params, microbatches, keys)
    if counts_before(model):
        with jax.named_scope("count"):
            metrics = one_pass(resolved, True, params, microbatches, keys, 1.0, None).metrics
        complete = model.counted.before(params, metrics)
        # there are more leaves now
        resolved = resolve(resolved.mesh, resolved.options, model, complete, plan)
    out = one_pass(resolved, forward_only, complete, microbatches, keys, grad_scale, weights)
    _check_pieces(resolved, params, microbatches, keys)
    if forward_only:
        return out
    return replace(out, grads=restrict_to(pruned(resolved.options.trainable, params), out.grads))


def _check_padding(resolved, forward_only, params, microbatches, keys) -> None:
    plan = resolved.plan
    if plan.padding_rows or (plan.remainder == "pad" and is_arranged(microbatches)):
        shapes, loss_fn = resolved.shapes(params), as_loss_fn(resolved.model)
        check_padding(loss_fn, shapes, microbatches, keys, forward_only=forward_only)


def _check_pieces(resolved, params, microbatches, keys) -> None:
    """Warns of a model that gives other results for pieces; called after the program, whose refusals come first."""
    if resolved.schedule is not None and resolved.schedule.num_pieces > 1:
        shapes = resolved.shapes(params)
        warn_of_places(resolved.model, shapes, microbatches, keys, resolved.schedule.num_pieces)


def add(resolved, forward_only, params, microbatches, keys, grad_scale, weights, sums) -> tuple:
    """Returns (the output of a part of an update, each device's `sums` with its gradients added)."""
    _check_padding(resolved, forward_only, params, microbatches, keys)
    program = SpmdProgram(resolved, forward_only, of_part=True)
    sums, *results = program.add(params, microbatches, keys, grad_scale, weights, sums)
    _check_pieces(resolved, params, microbatches, keys)
    return _output(resolved, None, *results), sums


def reduce(resolved, sums) -> PyTree:
    """Returns the gradients of an update from the sums of all its parts."""
    return SpmdProgram(resolved, False).reduce(sums)


def weigh(resolved, params, microbatches, keys) -> dict:
    """Returns what the rows of a batch count for each term that has a weight."""
    return SpmdProgram(resolved, True).weights(params, microbatches, keys)


JITTED = {
    run: per_options(run, static_argnums=(0, 1)),
    add: per_options(add, static_argnums=(0, 1), donate_argnums=7),
    reduce: per_options(reduce, static_argnums=0, donate_argnums=1),
    weigh: per_options(weigh, static_argnums=0),
}


def one_pass(
    resolved, forward_only, params, microbatches, keys, grad_scale, weights
) -> ForwardBackwardOutput:
    """Returns the output of one loop over all microbatches."""
    program = SpmdProgram(resolved, forward_only)
    return _output(resolved, *program.run(params, microbatches, keys, grad_scale, weights))


def _output(
    resolved, grads, loss, terms, metrics, per_microbatch, outputs, cut, facts
) -> ForwardBackwardOutput:
    outputs = merge(outputs, cut, resolved.plan, resolved.mesh)
    origin = Origin(
        rows=None,  # these three are filled in by the caller, outside of the program
        grad_scale=None,
        weights=None,
        normalize=resolved.options.normalize,
        groups=(tuple(sorted(terms)),),
        whole_batch=counts_before(resolved.model),
        **facts,
    )
    return ForwardBackwardOutput(loss, terms, grads, metrics, per_microbatch, outputs, origin)
