"""One global batch, one optimizer update. The file to read first after the README:

    batch -> forward_backward -> unscale -> finite? -> clip -> optax update (once) -> TrainState

Everything behind `forward_backward` sees whole arrays; XLA cuts them as parameters and optimizer state are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb import gradients
from jaxfb.batch_plan import BatchPlan
from jaxfb.compat import is_traced
from jaxfb.forward_backward import ForwardBackward, Packed, get_forward_backward_func
from jaxfb.optim import learning_rate_of
from jaxfb.optim.loss_scale import DynamicLossScale, LossScaleState, StaticLossScale
from jaxfb.optim.overwrite import overwrite
from jaxfb.parallel.sharding import abstract, adopt, shardings
from jaxfb.types import ForwardBackwardOutput, LossFn, Pipelined

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that one update reads and writes; what a checkpoint holds.

    step:                i32[], applied updates. The learning rate is a function of it, and of nothing else.
    samples:             i32[], rows of the applied updates.
    params:              the master parameters, float32 as a rule.
    opt_state:           the optimizer's; there is no microbatch in it.
    rng:                 PRNG key of the whole run; an update's key is folded from it.
    nonfinite_updates:   i32[], updates skipped because the gradient norm was not finite.
    zero_weight_updates: i32[], updates skipped because their rows counted nothing.
    loss_scale:          fp16 loss scaling, or None.
    """

    step: jax.Array
    samples: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array
    nonfinite_updates: jax.Array
    zero_weight_updates: jax.Array
    loss_scale: LossScaleState | None = None

    @classmethod
    def create(
        cls, params: PyTree, optimizer: optax.GradientTransformation, rng=0, loss_scale=None
    ) -> TrainState:
        """A fresh state. `rng` is a seed or a key; `loss_scale` a DynamicLossScale, StaticLossScale or None."""
        key = jax.random.key(rng) if isinstance(rng, int) else rng
        zero = lambda: jnp.zeros([], jnp.int32)  # noqa: E731
        scale = loss_scale and loss_scale.init()
        return cls(zero(), zero(), params, optimizer.init(params), key, zero(), zero(), scale)

    @property
    def attempts(self) -> jax.Array:
        """i32[], global batches consumed: applied and skipped updates."""
        return self.step + self.nonfinite_updates + self.zero_weight_updates


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """The record of one update; scalars on the device, float32 unless said otherwise.

    step:              i32, index of this update (applied updates before it).
    loss:              of the whole global batch.
    terms, weights:    name -> value of each term, and the weight that divided it.
    metrics:           name -> value of the loss function's metrics.
    grad_norm:         global norm of the reduced, divided, unscaled gradients.
    clipped_grad_norm: the same after clipping.
    clip_coefficient:  what the gradients were multiplied by.
    param_norm:        global norm of the parameters before the update ("weight norm").
    update_norm:       global norm of what was added to them (0 if skipped).
    learning_rate:     the one that this update used; nan for a transformation that does not tell.
    loss_scale:        that this update used, 1 without loss scaling.
    skipped:           bool, the update was not applied.
    nonfinite:         bool[num_leaves], which gradient leaves hold an inf or a nan; see `nonfinite_leaves`.
    nonfinite_updates, zero_weight_updates: i32, skipped so far, this one included.
    """

    step: jax.Array
    loss: jax.Array
    terms: dict
    weights: dict
    metrics: dict
    grad_norm: jax.Array
    clipped_grad_norm: jax.Array
    clip_coefficient: jax.Array
    param_norm: jax.Array
    update_norm: jax.Array
    learning_rate: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    nonfinite: jax.Array
    nonfinite_updates: jax.Array
    zero_weight_updates: jax.Array

    def nonfinite_leaves(self, params: PyTree) -> list[str]:
        """Paths of the gradient leaves with an inf or a nan in them, such as "['layers']['mlp']['up']"."""
        return gradients.names_of(self.nonfinite, params)


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
    **forward_backward_options,
) -> TrainStep:
    """Compiles `(TrainState, batch) -> (TrainState, StepMetrics)`; the state is donated.

    Args:
      model: `loss_fn(params, microbatch, rng)` or a `Pipelined`.
      optimizer: `make_optimizer(...)` or any optax transformation; applied once a call.
      plan: of purpose "train", or "critic" for a policy's value model; every batch has its rows.
      max_grad_norm: global norm to clip to; None does not clip.
      clip_convention: "exact" min(1, max/norm), "torch" min(1, max/(norm + 1e-6)).
      loss_scale: for float16; the loss itself is reported unscaled.
      dropout: False hands None to the model as rng; a plan that packs rows asks for that.
      forward_backward_options: as for `get_forward_backward_func`.

    Raises:
      ValueError: an option is illegal, or the plan does not fit the mesh.
    """
    gradients.check_clipping(max_grad_norm, clip_convention)
    if plan.purpose != "critic":
        plan.require("train", caller="make_train_step")
    if plan.packing and dropout:
        raise ValueError(
            "[train] dropout=True with packing=True would depend on how rows are packed; pass dropout=False to "
            "make_train_step, or a plan with packing=False"
        )
    fb = get_forward_backward_func(mesh, **forward_backward_options)
    return TrainStep(fb, model, optimizer, plan, max_grad_norm, clip_convention, loss_scale, dropout)


class TrainStep:
    """A compiled update, and where its state lives; made by `make_train_step`."""

    def __init__(
        self, forward_backward, model, optimizer, plan, max_grad_norm, clip_convention, loss_scale, dropout
    ):
        self.forward_backward: ForwardBackward = forward_backward
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self._max_grad_norm, self._clip_convention = max_grad_norm, clip_convention
        self._loss_scale, self._dropout = loss_scale, dropout
        self._jitted = jax.jit(self._update, static_argnums=3, donate_argnums=0)
        self._shardings: dict = {}
        self._numbers: dict[int, jax.Array] = {}

    def __call__(
        self, state: TrainState, batch: PyTree, rows: int | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Applies one update. `state` is donated: use the one that comes back.

        batch: as the plan says; with a token budget [rows, ...] leaves on the host, or them as `Packed`.
        rows: how many of the batch's rows are real, if fewer than the plan's (a short last window).
        """
        plan = self.plan
        if plan.by_tokens:
            packed = batch if isinstance(batch, Packed) else Packed(batch, plan)
            batch, plan = packed.batch, packed.plan
        batch = adopt(batch, NamedSharding(self.forward_backward.mesh, P()))
        return self._jitted(
            self.place(state), batch, self._rows(self.plan.real_rows if rows is None else rows), plan
        )

    def _rows(self, rows: int | jax.Array) -> jax.Array:
        """A number of rows on the mesh, moved there once, so that no later call moves anything."""
        if not isinstance(rows, int):
            return rows
        if rows not in self._numbers:
            everywhere = NamedSharding(self.forward_backward.mesh, P())
            self._numbers[rows] = jax.make_array_from_callback((), everywhere, lambda _: np.int32(rows))
        return self._numbers[rows]

    def lower(self, state: TrainState, batch: PyTree):
        """The step lowered for these (abstract) arguments, for ahead-of-time compilation."""
        return self._jitted.lower(state, batch, self.plan.real_rows, self.plan)

    def trace(self, state: TrainState, batch: PyTree):
        """The step traced for these arguments, which may live on an `AbstractMesh`; `.jaxpr` is its program."""
        return self._jitted.trace(state, batch, self.plan.real_rows, self.plan)

    def init(self, params: PyTree | Callable[[jax.Array], PyTree], rng: int | jax.Array = 0) -> TrainState:
        """A fresh state on the mesh.

        Args:
          params: the parameters, or a function key -> parameters, which is then run sharded, so that no
            device ever holds them whole.
        """
        key = jax.random.key(rng) if isinstance(rng, int) else rng
        if not callable(params):
            state = TrainState.create(params, self.optimizer, key, self._loss_scale)
            # a copy, since the state is donated and `params` are the caller's
            return jax.device_put(state, self.state_shardings(state), may_alias=False)

        create = self._creator(params)
        return jax.jit(create, out_shardings=self.state_shardings(jax.eval_shape(create, key)))(key)

    def abstract_state(self, params: Callable[[jax.Array], PyTree]) -> TrainState:
        """What `init` would give for a function key -> parameters, as shapes, dtypes and shardings: nothing is made."""
        shapes = jax.eval_shape(self._creator(params), jax.random.key(0))
        return abstract(shapes, self.state_shardings(shapes))

    def _creator(self, params: Callable[[jax.Array], PyTree]) -> Callable[[jax.Array], TrainState]:
        def create(key):
            return TrainState.create(
                params(jax.random.fold_in(key, 0)), self.optimizer, key, self._loss_scale
            )

        return create

    def place(self, state: TrainState) -> TrainState:
        """The state moved to where this step keeps it; nothing happens to what is there already."""
        if is_traced(state):
            return state
        leaves, structure = jax.tree.flatten(state)
        shapes = (structure, tuple(jnp.shape(leaf) for leaf in leaves))
        if shapes not in self._shardings:
            self._shardings[shapes] = self.state_shardings(state)
        targets = self._shardings[shapes]
        if all(
            getattr(x, "sharding", None) == y for x, y in zip(leaves, jax.tree.leaves(targets), strict=True)
        ):
            return state
        return jax.device_put(state, targets)

    def state_shardings(self, state: TrainState) -> TrainState:
        """NamedShardings of a (possibly abstract) state: params over fsdp and tensor, moments as the gradients."""
        fb, params = self.forward_backward, state.params
        specs = jax.tree.map(lambda _: P(), state)
        specs = replace(
            specs,
            params=fb.param_specs(self.model, params),
            opt_state=_moment_specs(state.opt_state, params, fb.grad_specs(self.model, params)),
        )
        return shardings(specs, fb.mesh)

    def _update(
        self, state: TrainState, batch: PyTree, rows: Any, plan: BatchPlan
    ) -> tuple[TrainState, StepMetrics]:
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)
        rng = jax.random.fold_in(state.rng, state.attempts) if self._dropout else None
        out = self.forward_backward(self.model, state.params, batch, plan, rng, grad_scale=scale)
        grads = gradients.unscale(out.grads, scale if state.loss_scale is not None else None)
        norm = gradients.global_norm(grads)
        finite, counted = jnp.isfinite(norm), _weight(out) > 0
        clipped, coefficient = gradients.clip_by_global_norm(
            grads, norm, self._max_grad_norm, self._clip_convention
        )
        applied = finite & counted
        params, opt_state, updates, said = self._apply(state, clipped, out.metrics, applied)
        params, param_norm, update_norm = _overwritten(applied, params, state.params, updates)
        new = _advance(state, params, opt_state, finite, counted, rows, self._loss_scale)
        new = jax.lax.with_sharding_constraint(new, self.state_shardings(state))
        return new, StepMetrics(
            step=state.step,
            loss=out.loss,
            terms={name: term.value for name, term in out.terms.items()},
            weights={name: term.weight for name, term in out.terms.items()},
            metrics={name: metric.value for name, metric in out.metrics.items()},
            grad_norm=norm,
            clipped_grad_norm=norm * coefficient,
            clip_coefficient=coefficient,
            param_norm=param_norm,
            update_norm=jnp.where(applied, update_norm, 0),
            learning_rate=learning_rate_of(self.optimizer, state.opt_state, state.samples, updated=said),
            loss_scale=scale,
            skipped=~applied,
            nonfinite=gradients.nonfinite_leaves(grads),
            nonfinite_updates=new.nonfinite_updates,
            zero_weight_updates=new.zero_weight_updates,
        )

    def _apply(self, state: TrainState, grads: PyTree, metrics: dict, applied: jax.Array) -> tuple:
        """The one optax update, where the gradients live (under ZeRO-1 cut over data), and what is counted.

        (parameters if it applies, optimizer state, updates, what the optimizer says of it).
        """
        with jax.named_scope("optimizer"):
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
            updates, opt_state, said = overwrite(
                self.optimizer, grads, state.opt_state, state.params, applied, samples=state.samples
            )
            counted = self.model.counted if isinstance(self.model, Pipelined) else None
            if counted is not None:
                leaves = counted.leaves(state.params)
                updates = jax.tree.map(lambda stays, u: jnp.zeros_like(u) if stays else u, leaves, updates)
            params = optax.apply_updates(state.params, updates)
        if counted is not None and counted.after is not None:
            params = counted.after(params, metrics)
        return params, opt_state, updates, said


def _overwritten(applied: jax.Array, new: PyTree, old: PyTree, updates: PyTree) -> tuple:
    """(`new` where applied, else `old`; global norms of old and of updates), written where `old` is.

    A compiler copies `old` unless the choice waits for the last that reads it. A GPU's takes the norm of the updates in
    the pass that writes parameters; the one for CPU gives that a pass of its own, which has to come first.
    """
    norms = gradients.global_norm(old), gradients.global_norm(updates)
    wait = jax.lax.optimization_barrier
    chosen, of_old, of_updates = jax.lax.platform_dependent(
        applied,
        *norms,
        cpu=lambda *values: wait(values),
        default=lambda applied, of_old, of_updates: (*wait((applied, of_old)), of_updates),
    )
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), new, old), of_old, of_updates


def _advance(state, params, opt_state, finite, counted, rows, loss_scale) -> TrainState:
    """The state after this attempt: what is kept of parameters and moments, and the counters."""
    applied = finite & counted
    return replace(
        state,
        params=params,
        opt_state=opt_state,
        step=state.step + applied,
        samples=state.samples + jnp.where(applied, rows, 0),
        nonfinite_updates=state.nonfinite_updates + ~finite,
        zero_weight_updates=state.zero_weight_updates + (finite & ~counted),
        loss_scale=loss_scale and loss_scale.update(state.loss_scale, finite),
    )


def _weight(out: ForwardBackwardOutput) -> jax.Array:
    return sum(jnp.abs(term.weight).astype(jnp.float32) for term in out.terms.values())


def _moment_specs(opt_state: PyTree, params: PyTree, grad_specs: PyTree) -> PyTree:
    """Optimizer state that mirrors a parameter (its path ends in the parameter's, same shape) lives as its gradient."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(grad_specs, is_leaf=lambda spec: isinstance(spec, P))
    known = {
        tuple(map(str, path)): (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def spec(path, leaf):
        names = tuple(map(str, path))
        for start in range(len(names) + 1):
            shape, found = known.get(names[start:], (None, None))
            if shape == leaf.shape:
                return found
        return P()

    return jax.tree_util.tree_map_with_path(spec, opt_state)
