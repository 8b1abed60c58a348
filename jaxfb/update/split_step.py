"""Makes an update from several calls: their gradients are added before they are applied.

g = step.gradients(state, a) + step.gradients(state, b, first_row=len(a))
state, metrics = step.apply(state, g)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward import Packed
from jaxfb.forward_backward.arguments import checked_weights
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel.set_mesh import on_its_mesh
from jaxfb.platforms.compiler import Options, options_for
from jaxfb.platforms.programs import per_options
from jaxfb.refusal import INT32, instance, integer
from jaxfb.types import LossFn, Pipelined, PyTree
from jaxfb.update.arguments import check_gradients, check_rows
from jaxfb.update.on_mesh import OnMesh
from jaxfb.update.pipeline_state import opened, shapes_of_params
from jaxfb.update.programs import Programs
from jaxfb.update.states import StepStates
from jaxfb.update.train_state import StepMetrics, TrainState


class SplitStep(StepStates):
    """A train step's methods that compute gradients, and that apply them."""

    _programs: Programs
    _on_mesh: OnMesh

    def _compile(self) -> None:
        """Forgets what was traced."""
        super()._compile()
        self._differentiated = per_options(self._programs.differentiate_in_model_order, static_argnums=(4, 5))
        self._applied = per_options(self._programs.apply_in_model_order, donate_argnums=0)

    @property
    def compiler_options(self) -> Options:
        """Returns the options of XLA that updates are compiled with: (name, value) of each."""
        return options_for(self.forward_backward.mesh, self.forward_backward.options.compiler_options)

    def key_of(self, state: TrainState) -> jax.Array | None:
        """Returns the PRNG key of the next update, None without dropout."""
        return self._programs.key_of(state)

    @on_its_mesh
    def gradients(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        model: LossFn | Pipelined | None = None,
        plan: BatchPlan | None = None,
        first_row: int = 0,
        weights: dict[str, Any] | None = None,
    ) -> ForwardBackwardOutput:
        """Returns loss, gradients and records of one batch, and leaves the state as it is.

        The results of several calls are added, `g = a + b`, and applied in one update, `apply(state, g)`. One call and
        `apply` do, bit for bit, what a call of the step does; with optimizer_memory="host" to rounding.

        Args:
          batch: [rows, ...] leaves, as many rows as the plan has.
          model: another loss function or `Pipelined` over the same parameters; None: the step's.
          plan: for a batch of another size; None: the step's.
          first_row: the number of the batch's first row in the update, so that each row draws its own dropout.
          weights: what divides each term, where an update consists of several calls whose terms have different weights:
            the sum, name by name, of what `weights` returns for each of their batches.

        Raises:
          ValueError: as for a call of the step, or weights are not those of the terms.
        """
        weights = checked_weights(weights, self.forward_backward.options.normalize)
        state = self._placed(state)
        model, plan, keys = self._of_call(state, model, plan, first_row)
        out = self._differentiate(state, batch, keys, weights, model, plan)
        return replace(out, origin=replace(out.origin, rows=plan.real_rows, weights=weights))

    def _differentiate(
        self, state: TrainState, batch: PyTree, keys: Any, weights: Any, model: Any, plan: BatchPlan
    ) -> ForwardBackwardOutput:
        """Returns the output of one call; outputs are in the order of the batch's rows."""
        if plan.max_context:  # not one program: the batch is cut on the host
            return self._programs.differentiate_in_model_order(state, batch, keys, weights, model, plan)
        program = self._differentiated(self.compiler_options)
        if not plan.by_tokens:
            return program(state, self._on_mesh.batch(batch), keys, weights, model, plan)
        packed = Packed(batch, plan)
        arrays = self._on_mesh.batch(packed.batch)
        return packed.restored(program(state, arrays, packed.keys(keys), weights, model, packed.plan))

    @on_its_mesh
    def weights(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        model: LossFn | Pipelined | None = None,
        plan: BatchPlan | None = None,
        first_row: int = 0,
    ) -> dict[str, jax.Array]:
        """Returns what a batch counts for each term that has a weight, name -> []; arguments as for `gradients`."""
        state = opened(self._placed(state))[0]  # weights depend on the data alone
        model, plan, keys = self._of_call(state, model, plan, first_row)
        keys = self.key_of(state) if keys is None else keys
        return self.forward_backward.weights(model, state.params, batch, plan, keys)

    def _of_call(
        self, state: TrainState, model: Any, plan: Any, first_row: int
    ) -> tuple[LossFn | Pipelined, BatchPlan, jax.Array | None]:
        """Returns the model and the plan of one call, and the keys of its rows unless they are the first."""
        model = self.model if model is None else model
        plan = instance("plan", self.plan if plan is None else plan, BatchPlan, "a jaxfb.BatchPlan")
        self.forward_backward.check_plan(model, plan)
        first_row = integer("first_row", first_row, least=0)
        key = self.key_of(state) if first_row else None
        keys = None if key is None else _keys_of_rows(key, first_row, plan.rows)
        return model, plan, keys

    @on_its_mesh
    def apply(
        self, state: TrainState, gradients: ForwardBackwardOutput, rows: int | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies one update by gradients that were computed before. `state` is donated, `gradients` are not.

        Args:
          gradients: what `gradients` or a forward_backward function returned for the state's parameters, or a sum.
          rows: how many rows they are of, if fewer than those of the plans.

        Raises:
          ValueError: the state was given to a step before, or the gradients are not like its parameters, or they do not
            consist of all calls whose weights divided them.
        """
        state = self._donated(state)
        check_gradients(gradients, self.forward_backward.trained(shapes_of_params(state)))
        applied_rows = gradients.origin.rows if rows is None else check_rows(rows, INT32)
        out, number = self._on_mesh.gradients(gradients), self._on_mesh.rows(applied_rows)
        return self._on_mesh.with_rate(*self._applied(self.compiler_options)(state, out, number))


@partial(jax.jit, static_argnums=2)
def _keys_of_rows(key: jax.Array, first_row: int, num_rows: int) -> jax.Array:
    """Returns the PRNG keys that those rows of a global batch have, whatever call they are in."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first_row + jnp.arange(num_rows))
