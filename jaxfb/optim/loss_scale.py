"""Loss scaling for float16: the factor that keeps small gradients above the smallest float16.

Part of "one update": `forward_backward` seeds the cotangents with the scale, `gradients.unscale` takes it out
again, and the scale then learns from whether the gradients were finite. bfloat16 and float32 need none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxfb.gradients import LARGEST
from jaxfb.optim.choose import check
from jaxfb.refusal import INT32, integer, number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScaleState:
    """scale: f32[]; finite_updates: i32[], how many in a row; hysteresis: i32[], how much of it is left."""

    scale: jax.Array
    finite_updates: jax.Array
    hysteresis: jax.Array


@dataclass(frozen=True)
class StaticLossScale:
    """Scales the loss by a number that never changes; a power of two changes no digit of the gradients."""

    scale: float

    def __post_init__(self):
        _check_positive("StaticLossScale", scale=self.scale)

    def init(self) -> LossScaleState:
        """Returns the state before the first update."""
        return _state(self.scale, 0)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the same state."""
        return state


@dataclass(frozen=True)
class DynamicLossScale:
    """Scales the loss by less after non-finite gradients, by more after many finite ones: Megatron's grad scaler.

    `hysteresis` counts non-finite updates since the last growth, in a row or not: the first hysteresis - 1 of
    them leave the scale alone, every later one multiplies it by `backoff` (down to `minimum`), until
    `growth_interval` finite updates in a row multiply it by `growth`, where float32 has the product, and fill the
    hysteresis up again.
    """

    initial: float = 2.0**32
    minimum: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    growth: float = 2.0
    backoff: float = 0.5

    def __post_init__(self):
        who = "DynamicLossScale"
        _check_positive(who, initial=self.initial, minimum=self.minimum)
        _check_counts(who, growth_interval=self.growth_interval, hysteresis=self.hysteresis)
        below = self.minimum <= self.initial
        check(below, f"{who}: minimum={self.minimum} must not be above initial; use at most {self.initial}")
        number("growth", self.growth, who=f"{who}:")
        number("backoff", self.backoff, who=f"{who}:")
        check(self.growth > 1, f"{who}: growth={self.growth} must be above 1; use 2")
        check(0 < self.backoff < 1, f"{who}: backoff={self.backoff} must be between 0 and 1; use 0.5")

    def init(self) -> LossScaleState:
        """Returns the state before the first update."""
        return _state(self.initial, self.hysteresis)

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Returns the state after gradients that were all finite, or not (bool[]). Pure; jit-able."""
        return jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), self._after_finite(state), self._after_overflow(state)
        )

    def _after_finite(self, state):
        run = state.finite_updates + 1
        grows = run >= self.growth_interval  # more: a run that continues with a shorter interval
        larger = state.scale * self.growth
        return LossScaleState(
            scale=jnp.where(grows & jnp.isfinite(larger), larger, state.scale),
            finite_updates=jnp.where(grows, 0, run),
            hysteresis=jnp.where(grows, self.hysteresis, state.hysteresis),
        )

    def _after_overflow(self, state):
        left = jnp.maximum(state.hysteresis - 1, 0)
        smaller = jnp.maximum(state.scale * self.backoff, self.minimum)
        return LossScaleState(
            scale=jnp.where(left == 0, smaller, state.scale),
            finite_updates=jnp.zeros_like(state.finite_updates),
            hysteresis=left,
        )


def _state(scale: float, hysteresis: int) -> LossScaleState:
    return LossScaleState(jnp.float32(scale), jnp.int32(0), jnp.int32(hysteresis))


def _check_positive(who: str, **numbers: float) -> None:
    """Refuses a scale that is not positive, or that float32 does not have."""
    for name, given in numbers.items():
        number(name, given, who=f"{who}:")
        check(0 < given <= LARGEST, f"{who}: {name}={given} must be positive and fit float32; use 1 or more")


def _check_counts(who: str, **counts: int) -> None:
    for name, count in counts.items():
        integer(name, count, who=f"{who}:", least=-INT32)
        check(count > 0, f"{who}: {name}={count} must be positive; use 1 or more")
