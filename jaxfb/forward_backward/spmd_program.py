"""The program of one call:

    microbatches -> weights -> seeds -> forward and backward -> one reduction -> records of the global batch

one `jax.shard_map`, manual over every axis but tensor, and on CPU devices over a tensor axis of size 1 too. What
happens between seeds and reduction is a `Strategy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.loss_function import repeated_draws
from jaxfb.forward_backward.loss_function.of_tokens import are_rearranged, of_tokens
from jaxfb.forward_backward.loss_function.over_context import AXIS, OverContext, traced_on_mesh
from jaxfb.forward_backward.loss_function.traced import Traced
from jaxfb.forward_backward.loss_function.weights import (
    check_experts,
    check_given,
    check_sums,
    check_terms,
    seeds,
    term_weights,
)
from jaxfb.forward_backward.microbatches import in_order_of_tokens, rows_spec, specs_of
from jaxfb.forward_backward.reduce import masked, reduce_metrics, reduce_records
from jaxfb.forward_backward.resolved import Resolved
from jaxfb.forward_backward.sequential import as_loss_fn
from jaxfb.mesh import EXPERT, axis_size, data_parallel, manual_axes, replica_axes, split_axes
from jaxfb.output import objective
from jaxfb.parallel import sharding
from jaxfb.refusal import Refused
from jaxfb.types import LossOutput, PyTree, Sum


class SpmdProgram:
    """Makes the program of one call, forward and backward or forward only.

    of_part: the call has a part of an update's rows, and other programs have the others.
    """

    def __init__(self, resolved: Resolved, forward_only: bool, of_part: bool = False):
        self._least_parts = 2 if of_part else 1
        self.mesh, self.model, self.normalize = resolved.mesh, resolved.model, resolved.options.normalize
        self.strategy = resolved.strategy(forward_only)
        self.shapes, self._remainder = resolved.shapes, resolved.plan.remainder
        self.specs, self.grad_specs = resolved.specs.tree, None if forward_only else resolved.grad_specs.tree

    def run(self, params: PyTree, microbatches: PyTree, keys: Any, grad_scale: Any, weights: Any) -> tuple:
        """Returns (grads, loss, terms, metrics, per_microbatch, outputs), global arrays, and facts about them.

        weights: name -> [] of the whole update that the batch is a part of; None: the batch is all of it.

        The facts are which outputs a context axis cuts, and those of `Origin` that the loss function decides.
        """
        body, data, specs = self._one_device(params, microbatches, keys)
        check_given(weights, body.traced)
        out_specs = (_manual(self.grad_specs), *self._of_records(body))
        results = self._on_mesh(body.run, body.traced.manual, (*specs, P(), P()), out_specs)(
            *data, grad_scale, weights
        )
        return *results, body.tokens, body.facts

    def add(
        self, params: PyTree, microbatches: PyTree, keys: Any, grad_scale: Any, weights: Any, sums: PyTree
    ) -> tuple:
        """Returns what `run` does with unreduced sums in place of gradients: each device's own, [devices, ...] leaves.

        sums: those of other rows of the update, over the same devices in the same order, to which these are added.
        """
        body, data, specs = self._one_device(params, microbatches, keys)
        check_given(weights, body.traced)
        in_specs, out_specs = (*specs, P(), P(), self._each), (self._each, *self._of_records(body))
        results = self._on_mesh(body.add, body.traced.manual, in_specs, out_specs)(
            *data, grad_scale, weights, sums
        )
        return *results, body.tokens, body.facts

    def reduce(self, sums: PyTree) -> PyTree:
        """Returns gradients from the sums that `add` returned: the one reduction of an update."""

        def one_device(sums):
            return self.strategy.reduce(_own(sums), self.grad_specs, split_axes(self.mesh))

        return self._on_mesh(one_device, manual_axes(self.mesh), (self._each,), _manual(self.grad_specs))(
            sums
        )

    @property
    def _each(self) -> P:
        """Returns the spec of what every device has for itself, but for what `tensor` cuts."""
        return P(manual_axes(self.mesh))

    def _of_records(self, body: _OneDevice) -> tuple:
        """Returns the specs of everything but gradients."""
        return P(), P(), P(), P(), jax.tree.map(partial(rows_spec, self.mesh), body.tokens)

    def weights(self, params: PyTree, microbatches: PyTree, keys: Any) -> dict:
        """Returns the weight of each term that has one over the whole batch, name -> []."""
        body, data, specs = self._one_device(params, microbatches, keys)
        return self._on_mesh(body.weights, body.traced.manual, specs[1:], P())(*data[1:])

    def _one_device(self, params: PyTree, microbatches: PyTree, keys: Any) -> tuple[_OneDevice, tuple, tuple]:
        """Returns the program of one device, its (params, microbatches, keys), and how these are cut."""
        cast = self.shapes(params)
        seen = jax.tree.map(self._seen_by_one_device, cast, self.specs)
        traced, context = traced_on_mesh(as_loss_fn(self.model), self.mesh, seen, cast, microbatches, keys)
        if context is None:
            microbatches = in_order_of_tokens(microbatches, self.mesh)
        num_parts = jax.tree.leaves(microbatches)[0].shape[0] * data_parallel(self.mesh)
        parts = max(num_parts, self._least_parts)
        check_terms(traced, seen, parts)
        given = seen, cast, microbatches, keys
        if (
            self.grad_specs is not None and traced.repeats_draws()
        ):  # an evaluation may draw the same on purpose
            warnings.warn(repeated_draws.WARNING, stacklevel=2)
        check_experts(traced, seen, [*map(self._cuts_experts, jax.tree.leaves(self.specs))])
        if self.normalize == "global":
            of_more_rows = partial(self._traced_for_more_rows, *given)
            check_sums(traced, of_more_rows, seen, parts)
        cut = specs_of(microbatches, self.mesh, context is not None)
        specs = (_manual(self.specs), cut, rows_spec(self.mesh))
        per_token = self._of_tokens(traced, context, given)
        body = _OneDevice(self, traced, context, num_parts, per_token)
        return body, (params, microbatches, keys), specs

    def _of_tokens(
        self, traced: Traced, context: OverContext | None, given: tuple
    ) -> tuple[bool, ...] | None:
        """Returns which outputs are per token, where a token budget has arranged the microbatches."""
        seen, cast, microbatches, keys = given
        if not are_rearranged(microbatches, self._remainder):
            return None
        if context is not None:
            return tuple(jax.tree.leaves(context.tokens))
        traced_for = lambda others: self._traced_for(seen, cast, others, keys)  # noqa: E731
        return of_tokens(traced.shape.outputs, microbatches, traced_for)

    def _traced_for_more_rows(self, seen, cast, microbatches, keys) -> Traced | None:
        """Returns the loss function traced for twice as many rows; None if it allows one size alone."""

        def twice(leaf):
            microbatches, rows, *rest = leaf.shape
            return jax.ShapeDtypeStruct((microbatches, 2 * rows, *rest), leaf.dtype)

        return self._traced_for(seen, cast, *jax.tree.map(twice, (microbatches, keys)))

    def _traced_for(self, seen, cast, microbatches, keys) -> Traced | None:
        """Returns the loss function traced for microbatches of other sizes; None if it does not take them."""
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            return traced_on_mesh(as_loss_fn(self.model), self.mesh, seen, cast, microbatches, keys)[0]
        return None

    def _cuts_experts(self, spec: P) -> bool:
        return axis_size(self.mesh, EXPERT) > 1 and any(map(sharding.cuts_experts, spec))

    def _on_mesh(
        self, function: Callable, manual: tuple[str, ...], in_specs: Any, out_specs: Any
    ) -> Callable:
        cut = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, axis_names=set(manual), check_vma=False, **cut)

    def _seen_by_one_device(self, leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        """Returns the shape of a parameter inside the model's functions: whole but for its share of the experts."""
        cut = (axis_size(self.mesh, EXPERT) if sharding.cuts_experts(entry) else 1 for entry in spec)
        shape = [size // parts for size, parts in zip(leaf.shape, [*cut, *[1] * leaf.ndim], strict=False)]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)


def _own(sums: PyTree) -> PyTree:
    """Returns this device's part of [devices, ...] leaves."""
    return jax.tree.map(lambda leaf: leaf[0], sums)


def _manual(specs: PyTree) -> PyTree:
    return jax.tree.map(sharding.manual_part, specs)


@dataclass(frozen=True)
class _OneDevice:
    """Runs on every device, inside `jax.shard_map`.

    traced:    the loss function of one microbatch.
    context:   None where sequences are whole.
    num_parts: microbatches of a replica times replicas.
    of_tokens: which leaves of the outputs are per token; None where no token budget has arranged the rows.
    """

    program: SpmdProgram
    traced: Traced
    context: OverContext | None
    num_parts: int
    of_tokens: tuple[bool, ...] | None

    def run(self, params, microbatches, keys, grad_scale, given) -> tuple:
        """Returns (grads, loss, terms, metrics, per_microbatch, outputs)."""
        program = self.program
        cut = {"grad_specs": program.grad_specs, "axes": split_axes(program.mesh)}
        run = partial(program.strategy.reduced, **cut)
        return self._results(params, microbatches, keys, grad_scale, given, run)

    def add(self, params, microbatches, keys, grad_scale, given, sums) -> tuple:
        """Returns what `run` does, with this device's sums, [1, ...] leaves, in place of gradients."""
        run = partial(self.program.strategy.forward_backward, so_far=_own(sums))
        sums, *results = self._results(params, microbatches, keys, grad_scale, given, run)
        return jax.tree.map(lambda leaf: leaf[None], sums), *results

    def _results(self, params, microbatches, keys, grad_scale, given, run: Callable) -> tuple:
        """Returns (gradients, loss, terms, metrics, per_microbatch, outputs).

        run: (prepared, microbatches, keys, seeds, accum_dtypes) -> (gradients, records).
        """
        weights = term_weights(self.traced, microbatches, keys, self.num_parts, self.context)
        strategy = self.program.strategy
        prepared, data = strategy.prepare(params), (microbatches, keys)
        if self.program.grad_specs is None:
            grads, out = None, strategy.forward(prepared, *data)
        else:
            seeds = self._seeds(weights, grad_scale, given)
            grads, out = run(prepared, *data, seeds, strategy.execution.sums)
        out = out if self.context is None else self.context.combined(out)
        return grads, *self._records(out, weights, given), out.outputs

    def weights(self, microbatches, keys) -> dict:
        """Returns the weights over the whole batch of the terms that have one."""
        weights = term_weights(self.traced, microbatches, keys, self.num_parts, self.context)
        reduced = jax.tree.map(lambda each: each.sum(0), reduce_records(weights, self._replicas))
        return {name: weight for name, weight in reduced.items() if name not in self.undivided}

    @property
    def undivided(self) -> tuple[str, ...]:
        """Returns the names of the terms without a weight."""
        return tuple(sorted(name for name, term in self.traced.places.terms.items() if term.weight is None))

    @property
    def facts(self) -> dict[str, tuple | None]:
        """Returns the facts of an `Origin` that the loss function decides."""
        return {"undivided": self.undivided, "of_tokens": self.of_tokens}

    @property
    def tokens(self) -> PyTree:
        """Returns a tree of bool like the outputs: which are per token and cut."""
        uncut = jax.tree.map(lambda _: False, self.traced.shape.outputs)
        return uncut if self.context is None else self.context.tokens

    def _seeds(self, weights: dict, grad_scale: Any, given: dict | None) -> dict:
        """Returns the cotangents of this replica's totals; the one collective sums one weight for each term.

        What all devices of the context axis compute alike has a gradient on one of them alone: gradients are summed
        over the axis, since parameters are cut over it.
        """
        dtype = jnp.result_type(*(term.total.dtype for term in self.traced.shape.terms.values()))
        reduced = {name: weight.sum() for name, weight in weights.items()}
        reduced = lax.psum(reduced, self._replicas) if self._replicas else reduced
        reduced |= given or {}
        made = seeds(weights, reduced, self.program.normalize, self.num_parts, grad_scale, dtype)
        if self.context is not None:
            return self.context.seeds(made)
        if axis_size(self.program.mesh, AXIS) == 1:
            return made
        return masked(lax.axis_index(AXIS) == 0, made)

    def _records(self, out: LossOutput, weights: dict, given: dict | None) -> tuple:
        """Returns (loss, terms, metrics, per_microbatch), reduced over replicas and context."""
        normalize = self.program.normalize
        totals = {name: term.total for name, term in out.terms.items()}
        if missing := sorted(set(weights) - set(totals)):
            raise Refused(
                f"the model's layers return the term {missing[0]!r}, which its layer_piece leaves out, so that it runs "
                "whole sequences only"
            )
        totals = totals if self.context is None else reduce_records(totals, (AXIS,))
        local = {name: Sum(total, weights[name]) for name, total in totals.items()}
        means = {name: term.value for name, term in local.items()} if normalize == "microbatch" else {}
        per_microbatch, means = reduce_records((local, means), self._replicas)
        terms = jax.tree.map(lambda records: records.sum(0), per_microbatch)
        if means:
            terms = {
                name: Sum(mean.sum(), jnp.asarray(self.num_parts, mean.dtype)) for name, mean in means.items()
            }
        metrics, each = reduce_metrics(out.metrics, self._axes)
        each = {f"metrics/{name}" if name in terms else name: metric for name, metric in each.items()}
        return objective(terms, normalize, given), terms, metrics, {**each, **per_microbatch}

    @property
    def _replicas(self) -> tuple[str, ...]:
        mesh = self.program.mesh
        return tuple(axis for axis in replica_axes(mesh) if mesh.shape[axis] > 1)

    @property
    def _axes(self) -> tuple[str, ...]:
        """Returns the axes over which results are partial."""
        return tuple(
            axis for axis in split_axes(self.program.mesh) if axis != AXIS or self.context is not None
        )
