"""The program of one call:

    microbatches -> weights -> seeds -> forward and backward -> one reduction -> records of the global batch

one `jax.shard_map`, manual over every axis but tensor. What happens between seeds and reduction is a `Core`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.cores import Core
from jaxfb.forward_backward.microbatches import rows_spec, specs_of
from jaxfb.forward_backward.reduce import across, means_of_microbatches, reduce_metrics, reduce_records
from jaxfb.forward_backward.sequential import as_loss_fn
from jaxfb.forward_backward.weights import objective, seeds, term_weights
from jaxfb.mesh import axis_size, data_parallel, manual_axes, replica_axes, split_axes
from jaxfb.parallel import sharding
from jaxfb.types import LossFn, LossOutput, Pipelined, Sum

PyTree = Any


@dataclass(frozen=True)
class Frame:
    """Builds one call's program: where arrays are placed, and how terms are normalised.

    specs, grad_specs: trees of PartitionSpec like params; grad_specs None: forward only.
    """

    mesh: Mesh
    core: Core
    model: LossFn | Pipelined
    normalize: str
    specs: PyTree
    grad_specs: PyTree | None

    def run(
        self, params: PyTree, microbatches: PyTree, keys: jax.Array | None, grad_scale: jax.Array
    ) -> tuple:
        """Returns (grads, loss, terms, metrics, per_microbatch, outputs, which outputs are of tokens), all whole
        arrays.
        """
        outputs = _Outputs(self.mesh)
        whole = jax.tree.map(self._seen_by_one_device, params, self.specs, self.core.how.dtypes)
        batch_specs = specs_of(microbatches, self.mesh)

        def body(params, microbatches, keys, grad_scale):
            weights = self._weights(whole, microbatches, keys)
            grads, out = self._forward_backward(params, microbatches, keys, weights, grad_scale, whole)
            return grads, *self._records(out, weights), *outputs.sorted(out.outputs, microbatches)

        manual = partial(jax.tree.map, sharding.manual_part, is_leaf=lambda spec: isinstance(spec, P))
        grad_specs = None if self.grad_specs is None else manual(self.grad_specs)
        *results, of_rows, of_tokens = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(manual(self.specs), batch_specs, rows_spec(self.mesh), P()),
            out_specs=(grad_specs, P(), P(), P(), P(), rows_spec(self.mesh), rows_spec(self.mesh, True)),
            axis_names=set(manual_axes(self.mesh)),
            check_vma=False,
        )(params, microbatches, keys, grad_scale)
        return *results, *outputs.joined(of_rows, of_tokens)

    def _forward_backward(
        self, params, microbatches, keys, weights, grad_scale, whole
    ) -> tuple[PyTree, LossOutput]:
        held = self.core.hold(params)
        if self.grad_specs is None:
            return None, self.core.forward(held, microbatches, keys)
        seed = self._seeds(weights, grad_scale, whole)
        grads, out = self.core.forward_backward(held, microbatches, keys, seed, self.core.how.sums)
        return self.core.reduce(grads, self.grad_specs, split_axes(self.mesh)), out

    def _weights(self, whole: PyTree, microbatches: PyTree, keys: jax.Array | None) -> dict:
        """Returns every term's weight in every microbatch of this replica, before anything else."""
        plain = as_loss_fn(self.model)
        cut = jax.tree.map(lambda leaf: leaf.ndim > 2, microbatches) if self._cuts_sequences else None
        return term_weights(plain, whole, microbatches, keys, self._num_parts(microbatches), cut)

    def _seeds(self, weights: dict, grad_scale: Any, whole: PyTree) -> dict:
        """Cotangents of this replica's totals; the one collective is a sum of a weight a term."""
        dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(whole)))
        reduced = {name: weight.sum() for name, weight in weights.items()}
        reduced = lax.psum(reduced, self._replicas) if self._replicas else reduced
        num_parts = self._num_parts(weights)
        return seeds(weights, reduced, self.normalize, num_parts, grad_scale, dtype)

    def _records(self, out: LossOutput, weights: dict) -> tuple:
        """Returns (loss, terms, metrics, per_microbatch), reduced over replicas and context."""
        totals = {name: term.total for name, term in out.terms.items()}
        totals = reduce_records(totals, ("context",)) if self._cuts_sequences else totals
        local = {name: Sum(total, weights[name]) for name, total in totals.items()}
        means = means_of_microbatches(local) if self.normalize == "microbatch" else {}
        per_microbatch, means = reduce_records((local, means), self._replicas)
        terms = jax.tree.map(lambda records: records.sum(0), per_microbatch)
        if means:
            num_parts = self._num_parts(means)
            terms = {
                name: Sum(mean.sum(), jnp.asarray(num_parts, mean.dtype)) for name, mean in means.items()
            }
        metrics, each = reduce_metrics(out.metrics, split_axes(self.mesh))
        each = {f"metrics/{name}" if name in terms else name: metric for name, metric in each.items()}
        return objective(terms, self.normalize), terms, metrics, {**each, **per_microbatch}

    def _num_parts(self, by_microbatch: PyTree) -> int:
        """Returns microbatches of a replica times replicas, from leaves [num_microbatches, ...]."""
        return jax.tree.leaves(by_microbatch)[0].shape[0] * data_parallel(self.mesh)

    def _seen_by_one_device(self, leaf: jax.Array, spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns a parameter as the model's own code sees it: cast, and whole but for its share of the experts."""
        cut = (axis_size(self.mesh, "expert") if "expert" in sharding.axes_of(entry) else 1 for entry in spec)
        shape = [size // parts for size, parts in zip(leaf.shape, [*cut, *[1] * leaf.ndim], strict=False)]
        return jax.ShapeDtypeStruct(tuple(shape), dtype)

    @property
    def _replicas(self) -> tuple[str, ...]:
        return tuple(axis for axis in replica_axes(self.mesh) if self.mesh.shape[axis] > 1)

    @property
    def _cuts_sequences(self) -> bool:
        return axis_size(self.mesh, "context") > 1


class _Outputs:
    """Sorts the collected outputs into those of rows, summed over context, and those of tokens, cut over it."""

    def __init__(self, mesh: Mesh):
        self._cut = axis_size(mesh, "context") > 1

    def sorted(self, outputs: PyTree, microbatches: PyTree) -> tuple[list, list]:
        lengths = {leaf.shape[2] for leaf in jax.tree.leaves(microbatches) if leaf.ndim > 2}
        leaves, self._structure = jax.tree.flatten(outputs)
        self._of_tokens = [self._cut and leaf.ndim > 2 and leaf.shape[2] in lengths for leaf in leaves]
        of_rows = [leaf for leaf, tokens in zip(leaves, self._of_tokens, strict=True) if not tokens]
        of_tokens = [leaf for leaf, tokens in zip(leaves, self._of_tokens, strict=True) if tokens]
        return across(lax.psum, of_rows, ("context",)) if self._cut else of_rows, of_tokens

    def joined(self, of_rows: list, of_tokens: list) -> tuple[PyTree, PyTree]:
        """Returns (the outputs, tree like them of bool: which are of tokens)."""
        rows, tokens = iter(of_rows), iter(of_tokens)
        leaves = [next(tokens) if token else next(rows) for token in self._of_tokens]
        return jax.tree.unflatten(self._structure, leaves), jax.tree.unflatten(
            self._structure, self._of_tokens
        )
