"""Moves what the caller of a train step has on the host, or elsewhere, to the devices of its mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.microbatches import Microbatches, check_leaves
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.sharding import adopt
from jaxfb.platforms.compat import is_traced
from jaxfb.types import PyTree
from jaxfb.update.arguments import check_limits
from jaxfb.update.train_state import Limits, StepMetrics


class OnMesh:
    """Batches, numbers and gradients on one mesh, each number moved once, so that no later call moves anything."""

    def __init__(self, mesh: Mesh):
        self._everywhere = NamedSharding(mesh, P())
        self._numbers: dict[int, jax.Array] = {}
        self._unknown: dict[Any, jax.Array] = {}

    def batch(self, batch: PyTree) -> PyTree:
        """Returns the leaves of a batch where the engine takes them; ValueError if they are not arrays of numbers."""
        check_leaves(batch.leaves if isinstance(batch, Microbatches) else batch)
        return adopt(batch, self._everywhere)

    def rows(self, rows: int | jax.Array) -> jax.Array:
        """Returns a number of rows as i32[]."""
        if not isinstance(rows, int):
            return rows
        if rows not in self._numbers:
            self._numbers[rows] = self._placed(np.array(rows, np.int32))
        return self._numbers[rows]

    def limits(self, limits: Limits | None) -> jax.Array | None:
        """Returns limits as f32[2]; ValueError if they are not numbers."""
        return None if limits is None else self._placed(np.array(check_limits(limits), np.float32))

    def gradients(self, gradients: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Returns of an output what an update needs."""
        out = adopt(replace(gradients, outputs=None), self._everywhere)
        names = () if out.origin.normalize == "global" else out.terms
        used = {name: out.per_microbatch[name] for name in names}
        # a copy, because the scale may be the state's array, which is donated
        scale = jax.tree.map(jnp.copy, out.origin.grad_scale)
        origin = replace(out.origin, rows=None, weights=None, grad_scale=scale)
        return replace(out, per_microbatch=used, origin=origin)

    def with_rate(self, state: Any, metrics: StepMetrics) -> tuple[Any, StepMetrics]:
        """Returns both as they are, but nan as a learning rate that is unknown.

        It is not a result of a program, all of which `jax_debug_nans` reports.
        """
        if metrics.learning_rate is not None:
            return state, metrics
        if is_traced(metrics):
            return state, replace(metrics, learning_rate=jnp.asarray(jnp.nan, float))
        dtype = jnp.result_type(float)
        if dtype not in self._unknown:
            self._unknown[dtype] = self._placed(np.array(np.nan, dtype))
        return state, replace(metrics, learning_rate=self._unknown[dtype])

    def _placed(self, numbers: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(numbers.shape, self._everywhere, lambda _: numbers)
