"""Makes one optimizer update from one global batch. The file to read first after the README:

    batch -> forward_backward -> unscale -> finite? -> clip -> optax update (once) -> TrainState

Everything behind `forward_backward` sees whole arrays; XLA cuts them as parameters and optimizer state are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb import cpu, gradients
from jaxfb.attempt import Attempt, Trial, find_nonfinite, of_dtype, rows_count
from jaxfb.batch_plan import BatchPlan
from jaxfb.compat import is_traced
from jaxfb.forward_backward import ForwardBackward, Packed, get_forward_backward_func
from jaxfb.forward_backward.arguments import check_params
from jaxfb.optim import learning_rate_of
from jaxfb.optim.loss_scale import DynamicLossScale, StaticLossScale
from jaxfb.parallel.annotations import tensor_specs, warn_if_whole
from jaxfb.parallel.sharding import abstract, adopt, moment_specs, shardings
from jaxfb.refusal import Refused, instance
from jaxfb.train_arguments import (
    check_alive,
    check_init_function,
    check_optimizer,
    check_options,
    check_rows,
    check_state,
    one_key,
)
from jaxfb.train_state import StepMetrics, TrainState, is_init_function
from jaxfb.types import ForwardBackwardOutput, LossFn, Pipelined

PyTree = Any


def make_train_step(
    model: LossFn | Pipelined,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    plan: BatchPlan,
    *,
    max_grad_norm: float | None = None,
    clip_convention: str = "exact",
    loss_scale: DynamicLossScale | StaticLossScale | None = None,
    dropout: bool = True,
    count_zeros: bool = False,
    **forward_backward_options,
) -> TrainStep:
    """Compiles `(TrainState, batch) -> (TrainState, StepMetrics)`; the state is donated.

    Args:
      model: `loss_fn(params, microbatch, rng)` or a `Pipelined`.
      optimizer: `make_optimizer(...)` or any optax transformation; applied once a call. One that takes extra arguments
        is given `value`, the loss, and `samples`, the rows of the updates before.
      plan: of purpose "train", or "critic" for a policy's value model; every batch has its rows.
      max_grad_norm: global norm to clip to; None does not clip.
      clip_convention: "exact" min(1, max/norm), "torch" min(1, max/(norm + 1e-6)).
      loss_scale: for float16; the loss itself is reported unscaled.
      dropout: False hands None to the model as rng; a plan that packs rows asks for that.
      count_zeros: fills in `StepMetrics.num_zeros`, at the price of another pass over the gradients.
      forward_backward_options: as for `get_forward_backward_func`.

    Raises:
      ValueError: an option is illegal, or model, mesh and plan do not fit together.
    """
    check_optimizer(optimizer)
    check_options(max_grad_norm, clip_convention, loss_scale, dropout=dropout, count_zeros=count_zeros)
    fb = get_forward_backward_func(mesh, **forward_backward_options)
    fb.check_plan(model, plan)
    if plan.packing and dropout:
        raise Refused(
            "[train] dropout=True with packing=True would depend on how rows are packed; pass dropout=False to "
            "make_train_step, or a plan with packing=False",
            [{"dropout": False}],
        )
    return TrainStep(
        fb, model, optimizer, plan, max_grad_norm, clip_convention, loss_scale, dropout, count_zeros
    )


def _on_the_host(leaf: jax.Array) -> Any:
    """Returns an array that one process has for itself as numpy, which any jit takes; others as they are."""
    return np.asarray(leaf) if getattr(leaf, "is_fully_addressable", True) else leaf


class TrainStep:
    """A compiled update, and where its state lives; made by `make_train_step`."""

    def __init__(
        self,
        forward_backward,
        model,
        optimizer,
        plan,
        max_grad_norm,
        clip_convention,
        loss_scale,
        dropout,
        count_zeros,
    ):
        self.forward_backward: ForwardBackward = forward_backward
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self._max_grad_norm, self._clip_convention = max_grad_norm, clip_convention
        self._loss_scale, self._dropout = loss_scale, dropout
        self._count_zeros = count_zeros
        self._numbers: dict[int, jax.Array] = {}
        self._own_specs, self._looked = None, False
        self._compile()

    def _compile(self) -> None:
        """Forgets what was traced."""
        self._plain = jax.jit(self._update, static_argnums=3, donate_argnums=0)
        self._in_order = jax.jit(
            self._update, static_argnums=3, donate_argnums=0, compiler_options=cpu.IN_ORDER
        )
        self._copied = jax.jit(self._create)
        self._shardings: dict = {}

    def __call__(
        self, state: TrainState, batch: PyTree, rows: int | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies one update. `state` is donated: use the one that comes back.

        batch: as the plan specifies; with a token budget [rows, ...] leaves on the host, or them as `Packed`.
        rows: how many of the batch's rows are real, if fewer than the plan's (a short last window).

        Raises:
          ValueError: the state was given to a step before, or batch or rows do not fit the plan.
        """
        plan = self.plan
        rows = plan.real_rows if rows is None else check_rows(rows, plan.real_rows)
        state = self.place(state)
        if plan.by_tokens:
            packed = batch if isinstance(batch, Packed) else Packed(batch, plan)
            batch, plan = packed.batch, packed.plan
        batch = adopt(batch, NamedSharding(self.forward_backward.mesh, P()))
        return self._jitted(state, batch, self._rows(rows), plan)

    @property
    def _jitted(self):
        return self._in_order if cpu.wants_options(self.forward_backward.mesh) else self._plain

    def _rows(self, rows: int | jax.Array) -> jax.Array:
        """Returns a number of rows on the mesh, moved there once, so that no later call moves anything."""
        if not isinstance(rows, int):
            return rows
        if rows not in self._numbers:
            everywhere = NamedSharding(self.forward_backward.mesh, P())
            self._numbers[rows] = jax.make_array_from_callback((), everywhere, lambda _: np.int32(rows))
        return self._numbers[rows]

    def lower(self, state: TrainState, batch: PyTree):
        """Lowers the step for these (abstract) arguments, for ahead-of-time compilation."""
        return self._jitted.lower(state, batch, self.plan.real_rows, self.plan)

    def trace(self, state: TrainState, batch: PyTree):
        """Traces the step for these arguments, which may live on an `AbstractMesh`; `.jaxpr` is its program."""
        return self._jitted.trace(state, batch, self.plan.real_rows, self.plan)

    def init(self, params: PyTree | Callable[[jax.Array], PyTree], rng: int | jax.Array = 0) -> TrainState:
        """Returns a fresh state on the mesh, whose arrays are its own: `params` stay the caller's.

        Args:
          params: the parameters, any pytree of float arrays; a model that can be called, such as an Equinox module, is
            one. Or a function key -> parameters (see `is_init_function`), which is then run sharded, so that no device
            ever holds them whole.
          rng: a seed, or a PRNG key.

        Raises:
          ValueError: a leaf is no float array, or is one that Flax does not keep as a parameter.
        """
        key = one_key(rng)
        if is_init_function(params):
            check_init_function(params)
            create = self._creator(params)
            shapes = jax.eval_shape(create, key)
            self._look_at(shapes.params, concrete=False)
            return jax.jit(create, out_shardings=self.state_shardings(shapes))(key)
        self._look_at(params)
        mesh = self.forward_backward.mesh
        places = shardings(self.forward_backward.param_specs(self.model, params), mesh)
        if jax.process_count() > 1:  # device_put does not reach devices of other processes; a jit does
            shapes = jax.eval_shape(self._create, params, key)
            made = jax.jit(self._create, out_shardings=self.state_shardings(shapes))
            return made(jax.tree.map(_on_the_host, params), key)
        return self._copied(*jax.device_put((params, key), (places, NamedSharding(mesh, P()))))

    def _look_at(self, params: PyTree, concrete: bool = True) -> None:
        """Checks parameters and takes over how they are cut over "tensor", which they do not tell while traced."""
        fb = self.forward_backward
        check_params(params, forward_only=False, concrete=concrete)
        pipelined = isinstance(self.model, Pipelined)
        asked = fb.tensor_specs if self._own_specs is None else None
        if not asked and not (pipelined and self.model.param_specs):
            found = tensor_specs(params, fb.mesh, stacked=pipelined)
            if found is not None and found != self._own_specs:
                self._own_specs = found
                self.forward_backward = fb = replace(fb, tensor_specs=lambda params: found)
                self._compile()
        if not self._looked:
            self._looked = True
            warn_if_whole(fb.param_specs(self.model, params), fb.mesh)

    def _create(self, params: PyTree, key: jax.Array) -> TrainState:
        """Makes a fresh state of copies: it will be donated, and where `device_put` moved nothing the arrays are the
        caller's.
        """
        state = TrainState.create(jax.tree.map(jnp.copy, params), self.optimizer, key, self._loss_scale)
        return jax.lax.with_sharding_constraint(state, self.state_shardings(state))

    def abstract_state(self, params: Callable[[jax.Array], PyTree]) -> TrainState:
        """Returns what `init` would return for a function key -> parameters, as shapes, dtypes and shardings."""
        shapes = jax.eval_shape(self._creator(params), jax.random.key(0))
        return abstract(shapes, self.state_shardings(shapes))

    def _creator(self, params: Callable[[jax.Array], PyTree]) -> Callable[[jax.Array], TrainState]:
        def create(key):
            return TrainState.create(
                params(jax.random.fold_in(key, 0)), self.optimizer, key, self._loss_scale
            )

        return create

    def place(self, state: TrainState) -> TrainState:
        """Returns the state moved to where this step keeps it; nothing happens to what is there already.

        Raises:
          ValueError: it is no TrainState, or a step has overwritten it.
        """
        instance("state", state, TrainState, "a jaxfb.TrainState, such as init(params) returns")
        if is_traced(state):
            return state
        check_alive(state)
        leaves, structure = jax.tree.flatten(state)
        shapes = (structure, tuple(jnp.shape(leaf) for leaf in leaves))
        if shapes not in self._shardings:
            self._look_at(state.params)
            check_state(state, self.optimizer, self._loss_scale)
            self._shardings[shapes] = self.state_shardings(state)
        targets = self._shardings[shapes]
        if all(
            getattr(x, "sharding", None) == y for x, y in zip(leaves, jax.tree.leaves(targets), strict=True)
        ):
            return state
        return jax.device_put(state, targets)

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns NamedShardings of a (possibly abstract) state: params over fsdp and tensor, moments as the
        gradients.
        """
        fb, params = self.forward_backward, state.params
        specs = jax.tree.map(lambda _: P(), state)
        specs = replace(
            specs,
            params=fb.param_specs(self.model, params),
            opt_state=moment_specs(state.opt_state, params, fb.grad_specs(self.model, params)),
        )
        return shardings(specs, fb.mesh)

    def _update(
        self, state: TrainState, batch: PyTree, rows: Any, plan: BatchPlan
    ) -> tuple[TrainState, StepMetrics]:
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)
        rng = self.key_of(state)
        out = self.forward_backward(self.model, state.params, batch, plan, rng, grad_scale=scale)
        trial = self._try(state, out, scale)
        params, opt_state = jax.lax.cond(
            trial.applied,
            lambda: self._kept(state, self._attempt(state, out, scale, trial.grad_norm)),
            lambda: (state.params, state.opt_state),
        )
        new = self._advance(replace(state, params=params, opt_state=opt_state), trial, rows)
        new = jax.lax.with_sharding_constraint(new, self.state_shardings(state))
        return new, self._metrics(state, new, out, trial, scale)

    def key_of(self, state: TrainState) -> jax.Array | None:
        """Returns the PRNG key of the next update, None without dropout."""
        return jax.random.fold_in(state.rng, state.attempts) if self._dropout else None

    def _try(self, state: TrainState, out: ForwardBackwardOutput, scale: jax.Array) -> Trial:
        """Computes the update for its flags and norms alone, so that none of its arrays is stored.

        What is kept is computed again, in the branch where the compiler may overwrite parameters and moments.
        """
        grads = self._unscaled(out, scale)
        norm, param_norm = gradients.global_norm(grads), gradients.global_norm(state.params)
        attempt = self._attempt(state, out, scale, norm)
        counted = rows_count(out, self.forward_backward.normalize)
        nonfinite = find_nonfinite(out.loss, grads, state.params, attempt, counted)
        # The norm is nan only where a parameter is. Waiting for it too, the branch comes after every reader of the old
        # parameters, else a compiler copies them.
        applied = ~nonfinite.any & counted & ~jnp.isnan(param_norm)
        return Trial(attempt, grads, norm, param_norm, nonfinite, applied)

    def _attempt(self, state: TrainState, out: ForwardBackwardOutput, scale: Any, norm: Any) -> Attempt:
        """Computes the one optax update, where the gradients are placed (under ZeRO-1 cut over data), and what is
        counted.
        """
        with jax.named_scope("optimizer"):
            grads, coefficient = gradients.clip_by_global_norm(
                self._unscaled(out, scale), norm, self._max_grad_norm, self._clip_convention
            )
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
            more = {"samples": state.samples, "value": out.loss}
            update = optax.with_extra_args_support(self.optimizer).update
            updates, opt_state = update(grads, state.opt_state, state.params, **more)
            counted = self.model.counted if isinstance(self.model, Pipelined) else None
            if counted is not None:
                leaves = counted.leaves(state.params)
                updates = jax.tree.map(lambda stays, u: jnp.zeros_like(u) if stays else u, leaves, updates)
            params = optax.apply_updates(state.params, updates)
        if counted is not None and counted.after is not None:
            params = counted.after(params, out.metrics)
        return Attempt(params, opt_state, updates, coefficient)

    def _unscaled(self, out: ForwardBackwardOutput, scale: jax.Array) -> PyTree:
        return gradients.unscale(out.grads, None if self._loss_scale is None else scale)

    def _kept(self, state: TrainState, attempt: Attempt) -> tuple[PyTree, PyTree]:
        """Returns the parameters and the optimizer's state after an attempt that is applied, of the dtypes of
        before.
        """
        old = (state.params, state.opt_state)
        new = jax.tree.map(of_dtype, (attempt.params, attempt.opt_state), old)
        places = self.state_shardings(state)
        return jax.lax.with_sharding_constraint(new, (places.params, places.opt_state))

    def _advance(self, state: TrainState, trial: Trial, rows: Any) -> TrainState:
        """Returns the state with the counters and the loss scale after this attempt."""
        applied, failed = trial.applied, trial.nonfinite.any
        scale = self._loss_scale and self._loss_scale.update(state.loss_scale, jnp.isfinite(trial.grad_norm))
        return replace(
            state,
            step=state.step + applied,
            samples=state.samples + jnp.where(applied, rows, 0),
            nonfinite_updates=state.nonfinite_updates + failed,
            zero_weight_updates=state.zero_weight_updates + (~failed & ~applied),
            loss_scale=scale,
        )

    def _metrics(
        self, old: TrainState, new: TrainState, out: ForwardBackwardOutput, trial: Trial, scale: Any
    ):
        attempt, norm = trial.attempt, trial.grad_norm
        return StepMetrics(
            step=old.step,
            loss=out.loss,
            terms={name: term.value for name, term in out.terms.items()},
            weights={name: term.weight for name, term in out.terms.items()},
            metrics={name: metric.value for name, metric in out.metrics.items()},
            grad_norm=norm,
            clipped_grad_norm=norm * attempt.clip_coefficient,
            clip_coefficient=attempt.clip_coefficient,
            param_norm=trial.param_norm,
            update_norm=jnp.where(trial.applied, gradients.global_norm(attempt.updates), 0),
            learning_rate=learning_rate_of(
                self.optimizer, old.opt_state, old.samples, updated=attempt.opt_state
            ),
            loss_scale=scale,
            skipped=~trial.applied,
            nonfinite=trial.nonfinite,
            nonfinite_updates=new.nonfinite_updates,
            zero_weight_updates=new.zero_weight_updates,
            num_zeros=gradients.num_zeros(trial.grads) if self._count_zeros else None,
        )
