"""Defines what an update reads and writes, and the metrics that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfb import gradients
from jaxfb.forward_backward.arguments import check_params
from jaxfb.optim.loss_scale import LossScaleState
from jaxfb.trainable import checked_patterns
from jaxfb.types import PyTree
from jaxfb.update.arguments import check_kept, check_loss_scale, check_optimizer, one_key


def is_init_function(params: Any) -> bool:
    """Tells a function that makes parameters from parameters, which can be callable too, as Equinox modules are.

    A callable is a function unless JAX knows it as a pytree; a `functools.partial` is one even so.
    """
    return isinstance(params, partial) or (callable(params) and jax.tree_util.all_leaves([params]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Holds the arrays that one update reads and writes, and that a checkpoint contains.

    step:                i32[], applied updates. The learning rate is a function of it, and of nothing else.
    samples:             i32[], rows of the applied updates.
    params:              the master parameters, float32 as a rule.
    opt_state:           the optimizer's; there is no microbatch in it.
    rng:                 PRNG key of the whole run; an update's key is folded from it.
    nonfinite_updates:   i32[], updates skipped because something was not finite, see `StepMetrics.nonfinite`.
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
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        rng: int | jax.Array = 0,
        loss_scale=None,
        trainable: Sequence[str] | None = None,
    ) -> TrainState:
        """Returns a fresh state around these very arrays, on no mesh yet (`TrainStep.init` copies and places them).

        Args:
          rng: a seed or a key.
          loss_scale: a DynamicLossScale, StaticLossScale or None.
          trainable: patterns of the parameters that are trained, as for `get_forward_backward_func`; the others may be
            of any dtype.

        Raises:
          ValueError: an argument is of another kind.
        """
        check_optimizer(optimizer)
        check_loss_scale(loss_scale)
        check_params(params, forward_only=False, concrete=True, trainable=checked_patterns(trainable))
        key = one_key(rng)
        zero = lambda: jnp.zeros([], jnp.int32)  # noqa: E731
        scale = loss_scale and loss_scale.init()
        return cls(zero(), zero(), params, check_kept(optimizer.init(params)), key, zero(), zero(), scale)

    @property
    def attempts(self) -> jax.Array:
        """Returns i32[], the global batches consumed: applied and skipped updates."""
        return self.step + self.nonfinite_updates + self.zero_weight_updates


class Limits(NamedTuple):
    """The largest loss and the largest gradient norm with which an update is applied; infinite: any."""

    loss: float
    grad_norm: float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NonFinite:
    """Flags of what was not finite in an attempted update; any of them skips the update.

    Each part is flagged where it begins: the updates only where all gradients were finite, a parameter if it was
    not finite before the update or if a finite update makes it overflow. Leaves are in the order of
    `jax.tree.leaves(params)`. A leaf whose norm overflows float32 is not finite either. A frozen leaf is never flagged.

    loss:       bool[].
    gradients:  bool[num_leaves], after loss scaling was taken out.
    updates:    bool[num_leaves], what the optimizer made of them.
    parameters: bool[num_leaves].
    """

    loss: jax.Array
    gradients: jax.Array
    updates: jax.Array
    parameters: jax.Array

    @property
    def any(self) -> jax.Array:
        """Returns bool[], whether anything was not finite."""
        parts = (self.gradients, self.updates, self.parameters)
        return self.loss | jnp.any(jnp.concatenate(parts))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Holds the numbers of one update: scalars on the device, float32 unless noted otherwise.

    step:              i32, index of this update (applied updates before it).
    loss:              of the whole global batch.
    terms, weights:    name -> value of each term, and the weight that divided it.
    metrics:           name -> value of the loss function's metrics.
    grad_norm:         global norm of the reduced, divided, unscaled gradients.
    clipped_grad_norm: the same after clipping.
    clip_coefficient:  what the gradients were multiplied by.
    param_norm:        global norm of the trained parameters before the update ("weight norm").
    update_norm:       global norm of what was added to them (0 if skipped).
    learning_rate:     the one that this update used, 0 in the first of a warmup that starts at 0; nan for an optax
                       transformation whose state does not hold it (`optax.inject_hyperparams` puts it there).
    loss_scale:        that this update used, 1 without loss scaling.
    skipped:           bool, the update was not applied.
    nonfinite:         NonFinite, what was not finite; `nonfinite_causes` names it.
    spike:             bool, loss or gradient norm was above the call's `Limits`, so that not even a counter of the
                       state changed; None where the call had none.
    nonfinite_updates, zero_weight_updates: i32, skipped so far, this one included.
    num_zeros:         float, how many numbers of the gradients are exactly zero; None unless it was asked for.
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
    nonfinite: NonFinite
    nonfinite_updates: jax.Array
    zero_weight_updates: jax.Array
    num_zeros: jax.Array | None = None
    spike: jax.Array | None = None

    def nonfinite_leaves(self, params: PyTree) -> list[str]:
        """Returns paths of the gradient leaves that are not finite, such as "['layers']['mlp']['up']"."""
        return gradients.names_of(self.nonfinite.gradients, params)

    def nonfinite_causes(self, params: PyTree) -> dict[str, list[str]]:
        """Returns, on the host, why the update was skipped: what was not finite -> the paths of its leaves.

        The keys are "loss", whose list is empty, "gradients", "updates" and "parameters", as in `NonFinite`. An empty
        dict: all was finite, so that a skipped update's rows counted nothing.

        Args:
          params: anything with the tree structure of the parameters.
        """
        found = {"loss": []} if np.any(self.nonfinite.loss) else {}
        for part in ("gradients", "updates", "parameters"):
            flags = getattr(self.nonfinite, part)
            if np.any(flags):
                found[part] = gradients.names_of(flags, params)
        return found
