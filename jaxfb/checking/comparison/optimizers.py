"""Names the optimizers of the random search, and computes an update on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfb.checking.comparison.difference import measures_of
from jaxfb.checking.drawing.case import Case
from jaxfb.optim import make_optimizer

PyTree = Any
RATE = 1e-2
EPS = 1e-3  # so large that a gradient of rounding errors is not a step of full length


def optimizer_of(name: str) -> optax.GradientTransformation:
    """Makes the optimizer that a case names."""
    return OPTIMIZERS[name]()


def _per_leaf() -> optax.GradientTransformation:
    def label(params):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)

    return optax.multi_transform({"matrix": optax.adam(RATE, eps=EPS), "vector": optax.sgd(RATE)}, label)


def _masked() -> optax.GradientTransformation:
    matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    return optax.chain(optax.masked(optax.trace(0.9), matrices), optax.scale(-RATE))


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: make_optimizer("adamw", learning_rate=RATE, weight_decay=0.1, eps=EPS),
    "lion": lambda: make_optimizer("lion", learning_rate=RATE, weight_decay=0.1),
    "adafactor": lambda: make_optimizer("adafactor", learning_rate=RATE, min_dim_size_to_factor=8, eps=1e-6),
    "muon": lambda: make_optimizer("muon", learning_rate=RATE, eps=EPS),
    "sgd": lambda: make_optimizer("sgd", learning_rate=RATE, weight_decay=0.1),
    "momentum": lambda: make_optimizer("sgd", learning_rate=RATE, momentum=0.9, nesterov=True),
    "optax.adam": lambda: optax.adam(RATE, eps=EPS),
    "optax.rmsprop": lambda: optax.rmsprop(RATE, eps=EPS, momentum=0.9, centered=True),
    "optax.adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "optax.lamb": lambda: optax.lamb(RATE, eps=EPS, weight_decay=0.1),
    "optax.optimistic": lambda: optax.optimistic_gradient_descent(RATE),
    "optax.schedule_free": lambda: optax.contrib.schedule_free_adamw(RATE, eps=EPS),
    "optax.amsgrad": lambda: optax.chain(optax.clip(1.0), optax.amsgrad(RATE, eps=EPS)),
    "optax.bfloat16_moments": lambda: optax.adamw(RATE, eps=EPS, mu_dtype=jnp.bfloat16),
    "optax.masked": _masked,
    "optax.per_leaf": _per_leaf,
    "optax.hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE, eps=EPS),
}


@dataclass(frozen=True)
class Update:
    """Collects the results of an update on one device, as numpy trees.

    params, opt_state: after it.  slack: what rounding of the gradients may change in each of their numbers.
    grad_norm, clipped_grad_norm: global norms.
    """

    params: PyTree
    opt_state: PyTree
    slack: PyTree
    grad_norm: float
    clipped_grad_norm: float


class OneUpdate:
    """Clips and updates on one device, compiled once."""

    def __init__(self, case: Case, tolerance: float):
        self._case, self._tolerance = case, tolerance
        self._optimizer = optimizer_of(case.optimizer)
        self._each = jax.jit(jax.vmap(self._update, in_axes=(0, None, None)))

    def init(self, params: PyTree) -> PyTree:
        """Returns the optimizer's first state."""
        with jax.enable_x64(self._case.x64):
            return jax.device_get(jax.jit(self._optimizer.init)(params))

    def __call__(self, grads: PyTree, opt_state: PyTree, params: PyTree) -> Update:
        """Returns the update of these gradients (float64), and how much others within the tolerance would change it."""
        variants = jax.tree.map(lambda *leaves: np.stack(leaves), *self._variants(grads))
        with jax.enable_x64(self._case.x64):
            after, state, norms = jax.device_get(self._each(variants, opt_state, params))
        first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
        slack = jax.tree.map(_spread, (after, state))
        return Update(first(after), first(state), slack, *(float(norm[0]) for norm in norms))

    def _update(self, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple:
        norm = optax.global_norm(grads)
        coefficient = self._coefficient(norm)
        given = jax.tree.map(lambda g, p: (g * coefficient).astype(p.dtype), grads, params)
        updates, state = self._optimizer.update(given, opt_state, params)
        return optax.apply_updates(params, updates), state, (norm, norm * coefficient)

    def _coefficient(self, norm: jax.Array) -> jax.Array:
        limit = self._case.max_grad_norm
        if limit is None:
            return jnp.ones_like(norm)
        return jnp.minimum(1, limit / (norm + (1e-6 if self._case.clip_convention == "torch" else 0)))

    def _variants(self, grads: PyTree) -> list[PyTree]:
        """Returns the gradients, and four that are a tolerance away: up, down, and twice either way at random."""
        leaves, structure = jax.tree.flatten(grads)
        rng = np.random.default_rng(0)
        signs = [rng.choice([-1.0, 1.0], leaf.shape) for leaf in leaves]
        noise = [self._tolerance * measure for measure in measures_of(leaves)]
        moves = [[0.0] * len(leaves), noise, [-one for one in noise]]
        moves += [[one * sign * way for one, sign in zip(noise, signs, strict=True)] for way in (1, -1)]
        return [
            structure.unflatten([leaf + move for leaf, move in zip(leaves, by, strict=True)]) for by in moves
        ]


def _spread(leaf: np.ndarray) -> np.ndarray:
    """Returns twice the largest difference of any variant to the first, [variants, ...] -> [...], in float64."""
    wide = np.asarray(leaf, np.float64)
    return 2 * np.max(np.abs(wide[1:] - wide[0]), axis=0)
