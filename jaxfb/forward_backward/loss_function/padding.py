"""Checks that a loss function does not count the rows of zeros that fill up the last microbatch of some plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.forward_backward.loss_function.traced import Traced
from jaxfb.forward_backward.loss_function.weights import check_data_only, reads_microbatch
from jaxfb.refusal import Refused
from jaxfb.types import LossFn, Max, Min, PyTree, Sum

MOST = 2**30
"""Totals are computed where that takes about this many operations at most: two for each parameter and position."""
_MASK = "count with a mask that is 0 there, such as Sum(jnp.where(mask > 0, loss, 0).sum(), mask.sum())"
_WHERE = (
    "jnp.where hides the value of what divides by 0, or of a norm of zeros, but JAX differentiates both of its sides: "
    "replace what is divided by, or what the norm is of, inside of it, such as x / jnp.where(mask, size, 1)"
)


def check_padding(
    loss_fn: LossFn,
    params: PyTree,
    microbatches: PyTree,
    keys: jax.Array | None,
    otherwise: str = 'remainder="drop" or "error"',
    forward_only: bool = False,
) -> None:
    """Checks that rows of zeros count nothing, on a microbatch of them alone.

    Their weights and totals must be 0; totals are computed with random parameters, unless the model is too large.
    Metrics that count them get a warning, and so do totals whose gradient is finite for other rows but not for these:
    behind `jnp.where(mask, ...)` the value of x / 0 is hidden, but the derivative is not.

    Args:
      params, microbatches, keys: arrays or shapes; no value is read.
      otherwise: what to use where the rows of zeros cannot be masked.
      forward_only: whether no gradient is computed, so that none can be NaN.

    Raises:
      ValueError: a weight or a total of such rows is not 0, though the term's total reads the microbatch.
    """
    one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    microbatch, rng = jax.tree.map(one, (microbatches, keys))
    try:
        traced = Traced(loss_fn, params, microbatch, rng)
    except NameError:  # raised for an axis name outside of a mesh
        return
    check_data_only(traced, params)
    traced = traced.with_numbers()
    blank = _Blank(traced, params, microbatch, rng)
    _check_terms(traced, blank, otherwise)
    if not forward_only:
        _warn_of_gradients(traced, blank, otherwise)
    _warn_of_metrics(traced, blank, otherwise)


def _check_terms(traced: Traced, blank: _Blank, otherwise: str) -> None:
    """Raises ValueError for a term whose weight or total counts rows of zeros."""
    for name, term in traced.places.terms.items():
        if reads_microbatch(traced, name):
            for part in ("weight", "total"):
                _check_term(name, part, blank.of(getattr(term, part)), otherwise)


def _warn_of_gradients(traced: Traced, blank: _Blank, otherwise: str) -> None:
    """Warns of terms whose gradients rows of zeros make NaN or infinite."""
    if spoilt := _spoilt(traced, blank):
        warnings.warn(
            f"the plan fills microbatches up with rows of zeros, whose gradient of {', '.join(spoilt)} is NaN or "
            f"infinite, although they count nothing; {_WHERE}, or use {otherwise}",
            stacklevel=3,
        )


def _warn_of_metrics(traced: Traced, blank: _Blank, otherwise: str) -> None:
    """Warns of metrics that count rows of zeros."""
    counting = sorted(name for name, metric in traced.places.metrics.items() if blank.counts_in(metric))
    if counting:
        warnings.warn(
            f"the plan fills microbatches up with rows of zeros, and {', '.join(counting)} of the metrics "
            f"count{'s' * (len(counting) == 1)} them; {_MASK}, or use {otherwise}",
            stacklevel=3,
        )


def _spoilt(traced: Traced, blank: _Blank) -> list[str]:
    """Returns the terms whose gradients rows of zeros spoil; one program shows it for all where they spoil none."""
    totals = {name: term.total for name, term in sorted(traced.places.terms.items())}
    if not blank.spoils(*totals.values()):
        return []
    return [name for name, total in totals.items() if blank.spoils(total)]


def _check_term(name: str, part: str, counted: np.ndarray, otherwise: str) -> None:
    if np.any(counted != 0):
        raise Refused(
            f"the plan fills microbatches up with rows of zeros, and term {name!r} counts them: its {part} is "
            f"{counted.max():g} for a microbatch of nothing else; {_MASK}, or use {otherwise}"
        )


class _Blank:
    """Results of a loss function for a microbatch of zeros and random parameters."""

    def __init__(self, traced: Traced, params: PyTree, microbatch: PyTree, rng: Any):
        self._traced, self._shapes = traced, (params, microbatch, rng)
        positions = max((leaf.size for leaf in jax.tree.leaves(microbatch)), default=1)
        self._is_short = 2 * positions * sum(leaf.size for leaf in jax.tree.leaves(params)) <= MOST

    def counts_in(self, metric: Any) -> bool:
        """Returns whether a metric reads the microbatch, and its value changes by rows of zeros."""
        places = jax.tree.leaves(metric)
        if not any(self._traced.reads(*places)[1]):
            return False
        if isinstance(metric, Sum):
            return any(np.any(self.of(place) != 0) for place in places)
        neutral = {Max: -np.inf, Min: np.inf}.get(type(metric))
        return neutral is None or bool(np.any(self.of(metric.array, neutral) != neutral))

    def of(self, place: int | None, unknown: float = 0) -> np.ndarray:
        """Returns one result; `unknown` where there is none, or it takes too long to compute."""
        if place is None or (any(self._traced.reads(place)[0]) and not self._is_short):
            return np.asarray(unknown)
        params, microbatch, rng = self._shapes
        draw = np.random.default_rng(0)
        with jax.ensure_compile_time_eval():
            params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), leaf.dtype), params)
            given = jax.tree.map(_blank_leaf, microbatch), some_keys(rng)
            return np.asarray(jax.jit(self._traced.function(place))(params, *given)[0], np.float64)

    def spoils(self, *totals: int) -> bool:
        """Returns whether the gradient of a sum of totals is finite for other rows, but not for rows of zeros alone.

        It is so with parameters of both signs and with positive ones, since some functions are of positive ones only.
        """
        if not self._is_short or not any(self._traced.reads(*totals)[0]):
            return False
        with suppress(Exception):  # what cannot be differentiated fails again where it is
            gradient = self._gradient(totals)
            return all(
                not self._is_finite(gradient, sign, _blank_leaf)
                and self._is_finite(gradient, sign, other_leaf)
                for sign in (np.asarray, np.abs)
            )
        return False

    def _gradient(self, totals: tuple[int, ...]) -> Callable:
        """Returns the compiled function (params, microbatch, rng) -> gradient of the sum of totals."""
        run = self._traced.function(*totals)
        return jax.jit(jax.grad(lambda *given: sum(run(*given)), allow_int=True))

    def _is_finite(self, gradient: Callable, sign: Callable, leaf_of: Callable) -> bool:
        """Returns whether the gradient for a microbatch of such leaves, and random parameters, is finite."""
        shapes, microbatch, rng = self._shapes
        draw = np.random.default_rng(0)
        with jax.ensure_compile_time_eval():
            params = jax.tree.map(
                lambda leaf: jnp.asarray(sign(draw.normal(size=leaf.shape)), leaf.dtype), shapes
            )
            found = gradient(params, jax.tree.map(leaf_of, microbatch), some_keys(rng))
            floats = [leaf for leaf in jax.tree.leaves(found) if leaf.dtype != jax.dtypes.float0]
            return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


def some_keys(rng: Any) -> jax.Array | None:
    return None if rng is None else jax.random.split(jax.random.key(0), rng.shape)


def other_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns numbers that a row may have, none of them 0."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    return (
        _blank_leaf(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        else jnp.ones(leaf.shape, leaf.dtype)
    )


def _blank_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros; of PRNG keys, which cannot be zero, some keys of their kind."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    kinds = []

    def data(keys):
        kinds.append(jax.random.key_impl(keys))  # asked of a traced array: a mere shape does not know it
        return jax.random.key_data(keys)

    raw = jax.eval_shape(data, leaf)
    return jax.random.wrap_key_data(jnp.zeros(raw.shape, raw.dtype), impl=kinds[0])
