"""Builds what a toy's loss function returns: terms of several weights, metrics of every kind and shape, outputs.

All are sums, maxima or minima over rows and tokens that count, so that padding and a cut change nothing.
Shapes: R = rows, T = tokens of a row, W = width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfb.checking.drawing.case import Case
from jaxfb.types import Last, LossOutput, Max, Min, Sum

FEW = 5  # numbers in a metric or output that is a vector


@dataclass(frozen=True)
class Given:
    """Collects what terms, metrics and outputs are made of; [R, T] arrays unless another shape is given.

    hidden: [R, T, W], in float32 at least.  gain: [3].  losses: zero where nothing counts.
    picked: log-probabilities of the targets.  weight: [R].  scale: [R], ones or something infinite.
    """

    hidden: jax.Array
    gain: jax.Array
    losses: jax.Array
    picked: jax.Array
    tokens: jax.Array
    counts: jax.Array
    mask: jax.Array
    weight: jax.Array
    row: jax.Array

    @property
    def masked(self) -> jax.Array:
        """Returns hidden [R, T, W] with zeros where nothing counts."""
        return jnp.where(self.counts[..., None], self.hidden, 0)


def output(case: Case, logits: jax.Array, hidden: jax.Array, microbatch: dict, gain: jax.Array) -> LossOutput:
    """Returns the terms, metrics and outputs that the case names, of logits [R, T, V] and hidden [R, T, W]."""
    given = _given(logits, hidden, microbatch, gain)
    return LossOutput(
        {name: TERMS[name](given) for name in case.terms},
        {name: METRICS[name](given) for name in case.metrics},
        {name: OUTPUTS[name](given) for name in case.outputs} or None,
    )


def _given(logits: jax.Array, hidden: jax.Array, microbatch: dict, gain: jax.Array) -> Given:
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
    tokens, mask = microbatch["tokens"], microbatch["mask"]
    log_probs = jax.nn.log_softmax(wide(logits))
    picked = jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]
    losses = jnp.where(mask > 0, -picked * microbatch["scale"][:, None], 0)
    rest = (tokens, mask > 0, mask, microbatch["weight"], microbatch["row"])
    return Given(wide(hidden), wide(gain), losses, picked, *rest)


def _rows(given: Given) -> Sum:
    squares = (given.masked**2).sum((1, 2))
    return Sum(1e-2 * (squares * given.weight).sum() * given.gain.sum(), given.weight.sum())


def _shape(given: Given) -> Sum:
    return Sum(1e-2 * given.masked[..., 0].sum(), float(given.hidden.shape[0]))


def _vector(given: Given) -> jax.Array:
    return given.masked[..., :FEW]


def _counted(given: Given, x: jax.Array, otherwise: float) -> jax.Array:
    return jnp.where(given.counts if x.ndim == 2 else given.counts[..., None], x, otherwise)


TERMS: dict[str, Callable[[Given], Sum]] = {
    "tokens": lambda g: Sum(g.losses.sum(), g.mask.sum()),
    "rows": _rows,
    "sum": lambda g: Sum(1e-2 * (g.masked[..., 1] * g.gain[0]).sum(), None),
    "shape": _shape,
    "negative": lambda g: Sum(-1e-2 * (g.masked[..., 2] ** 2).sum(), -g.mask.sum()),
}
METRICS: dict[str, Callable[[Given], Sum | Max | Min | Last]] = {
    "mean": lambda g: Sum(g.losses.sum(), g.mask.sum()),
    "sum_vector": lambda g: Sum((_vector(g) ** 2).sum((0, 1)), g.mask.sum()),
    "sum_vectors": lambda g: Sum((_vector(g) ** 2).sum((0, 1)), g.mask.sum() * jnp.arange(1.0, FEW + 1)),
    "sum_undivided": lambda g: Sum((g.masked**2).sum(), None),
    "count": lambda g: Sum(jnp.where(g.counts, g.tokens, 0).sum(), g.counts.sum()),
    "max": lambda g: Max(g.losses.max()),
    "max_vector": lambda g: Max(_counted(g, _vector(g), -1e4).max((0, 1))),
    "max_int": lambda g: Max(jnp.where(g.counts, g.tokens, -1).max()),
    "max_bool": lambda g: Max((g.counts & (g.tokens > 20)).any()),
    "min": lambda g: Min(_counted(g, g.picked, 1e4).min()),
    "min_vector": lambda g: Min(_counted(g, _vector(g), 1e4).min((0, 1))),
    "min_int": lambda g: Min(jnp.where(g.counts, g.tokens, 99).min()),
    "min_bool": lambda g: Min((~g.counts | (g.tokens < 20)).all()),
    "last": lambda g: Last(g.picked[-1, -1]),
    "last_vector": lambda g: Last(g.hidden[-1, -1, :FEW]),
    "last_int": lambda g: Last(g.row[-1]),
    "last_bool": lambda g: Last(g.counts[-1, -1]),
}
OUTPUTS: dict[str, Callable[[Given], jax.Array]] = {
    "row": lambda g: g.losses.sum(1),
    "token": lambda g: jnp.where(g.counts, g.picked, 0),
    "vector": lambda g: (_vector(g) ** 2).sum(1),
    "int": lambda g: jnp.where(g.counts, g.tokens, 0).sum(1),
    "bool": lambda g: g.counts.any(1),
    "id": lambda g: g.row,
}
