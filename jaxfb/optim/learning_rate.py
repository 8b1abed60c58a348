"""Learning rate as a function of applied updates, or of consumed samples. Part of "one update".

Every schedule is a rise (the warmup) followed by a fall, both drawn by shapes on [0, 1]:

  count < warmup:  initial + (peak - initial) * rise(count / warmup)
  after it:        final + (peak - final) * fall((count - warmup) / (total - warmup))

The first update sees count 0, so it uses `initial` where there is a warmup. The numbers are those of
transformers' `get_scheduler` and of Megatron's `OptimizerParamScheduler`; where the two differ there is an
argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfb.optim.choose import build, check, choose, real
from jaxfb.parts import LEARNING_RATES
from jaxfb.refusal import boolean

UNITS = {"updates": "applied updates", "samples": "consumed rows"}

# Tails: 1 at r=0, 0 at r=1. cos^2(x/2) is (1 + cos x) / 2 without its cancellation in float32.
FALLS = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: jnp.cos(jnp.pi / 2 * r) ** 2,
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - jnp.sqrt(r),
}
# The same mirrored, rise(r) = fall(1 - r), again written so that a small r keeps its digits.
RISES = {
    "linear": lambda r: r,
    "cosine": lambda r: jnp.sin(jnp.pi / 2 * r) ** 2,
    "exponential": lambda r: jnp.expm1(jnp.log(2) * r),
    "minus_sqrt": lambda r: r / (1 + jnp.sqrt(1 - r)),
}


@dataclass(frozen=True)
class Schedule:
    """A pure function of a count, usable wherever optax takes a schedule, that knows what it counts.

    function: float[] -> float[], float64 where x64 is on, otherwise float32.
    unit:     "updates" (applied ones: a skipped update does not count) or "samples" (consumed rows).
    total:    the count at which it ends, or None.
    """

    function: Callable[[jax.Array], jax.Array]
    unit: str = "updates"
    total: int | float | None = None

    def __call__(self, count: jax.typing.ArrayLike) -> jax.Array:
        return self.function(jnp.asarray(count, float))


def lr_schedule(
    name: str,
    *,
    peak: float,
    total: int | None = None,
    warmup: int = 0,
    initial: float = 0.0,
    final: float = 0.0,
    warmup_shape: str = "linear",
    unit: str = "updates",
    **shape,
) -> Schedule:
    """Makes a learning-rate schedule by name; `total`, `warmup` and `decay` are counted in `unit`.

    Args:
      name: constant, linear, cosine, cosine_restarts, polynomial, inverse_sqrt or wsd (warmup-stable-decay), one
        registered in `jaxfb.parts.LEARNING_RATES`, or "module:function": a function of a `Span` and
        of its own options that returns the rate after the warmup as a function of the count.
      peak: the rate at the end of the warmup.
      total: where the fall ends. Needed by all but constant, which ignores it, and inverse_sqrt (see there).
      warmup: length of the rise, less than `total`.
      initial: rate of the first update of a warmup; at 0, as in transformers, that update moves nothing.
        transformers starts its wsd at `final`, all else at 0.
      final: rate at and after `total`, at most `peak`. Ignored by constant.
      warmup_shape: linear, cosine, exponential or minus_sqrt.
      unit: "updates", or "samples": the argument is then the number of rows consumed so far.
      shape: what is particular to one of them,
        cosine: cycles=0.5, in waves of the cosine; clamp=True holds the last value after `total` (Megatron),
          False lets the cosine continue, so that the rate rises again (transformers).
        cosine_restarts: cycles=1, the number of falls from peak to final.
        polynomial: power=1.0.
        inverse_sqrt: timescale, for peak * sqrt(timescale / (timescale + count - warmup)) (transformers).
          Default: peak * sqrt(w / count) with w = max(warmup, 1) (Megatron). Never below `final`; with a
          `total` it drops to `final` after it (Megatron), without one it continues.
        wsd: decay, the length of the tail that ends at `total`; tail="linear", cosine, exponential
          (2 * 0.5^r - 1) or minus_sqrt (1 - sqrt(r)).
    Returns:
      Schedule: count -> float[].
    Raises:
      ValueError: unknown name or argument, or numbers that make no schedule.
    """
    builder = choose("learning-rate schedule", name, LEARNING_RATES)
    who = f"lr_schedule({name!r})"
    rise = choose("warmup shape", warmup_shape, RISES)
    choose("unit", unit, UNITS)
    peak, initial, final = _rates(who, peak=peak, initial=initial, final=final)
    total, warmup = _lengths(who, total, warmup, open_ended=getattr(builder, "open_ended", False))
    fall = build(who, builder, Span(who, peak, final, total, warmup), **shape)

    def function(count):
        risen = initial + (peak - initial) * rise(jnp.minimum(count / max(warmup, 1), 1))
        return jnp.where(count < warmup, risen, fall(count))

    return Schedule(function, unit, total)


class Span(NamedTuple):
    """The points between which a fall is drawn: from (warmup, peak) to (total, final). who: begins its refusals.

    total is None only for a fall that is `open_ended`.
    """

    who: str
    peak: float
    final: float
    total: int | None
    warmup: int

    @property
    def length(self):
        """Returns the counts from the end of the warmup to total."""
        assert self.total is not None, "only a fall that is open_ended has no end, and it asks for no length"
        return self.total - self.warmup

    def progress(self, count):
        """Returns 0 at the end of the warmup and 1 at total; it continues after it."""
        return (count - self.warmup) / self.length

    def at(self, height):
        """Scales a shape's height, 1..0, to a rate."""
        return self.final + (self.peak - self.final) * height


def open_ended(builder: Callable) -> Callable:
    """Marks the builder of a fall that needs no `total`."""
    builder.open_ended = True
    return builder


@open_ended
def constant(span):
    """Draws the peak; see `lr_schedule`."""
    return lambda count: jnp.full_like(count, span.peak)


def linear(span):
    """Draws a straight line from peak to final; see `lr_schedule`."""
    return polynomial(span)


def polynomial(span, power=1.0):
    """Draws a power of the straight line; see `lr_schedule`."""
    power = real(span.who, "power", power)
    check(power > 0, f"{span.who}: power={power} must be positive; use 1 for a straight line")
    return lambda count: span.at((1 - jnp.minimum(span.progress(count), 1)) ** power)


def cosine(span, cycles=0.5, clamp=True):
    """Draws waves of a cosine; see `lr_schedule`."""
    cycles = real(span.who, "cycles", cycles)
    boolean("clamp", clamp, who=f"{span.who}:")
    check(cycles > 0, f"{span.who}: cycles={cycles} must be positive; use 0.5 for one fall")

    def fall(count):
        progress = span.progress(count)
        return span.at(FALLS["cosine"](2 * cycles * (jnp.minimum(progress, 1) if clamp else progress)))

    return fall


def cosine_restarts(span, cycles=1):
    """Draws several falls along half a cosine; see `lr_schedule`."""
    cycles = real(span.who, "cycles", cycles)
    whole = cycles >= 1 and cycles == int(cycles)
    check(whole, f"{span.who}: cycles={cycles} must be a whole number of falls; use {max(1, round(cycles))}")

    def fall(count):
        # The remainder of whole numbers: of a rounded quotient a fall would begin a count late, or once more at total.
        done = cycles * (count - span.warmup) % span.length / span.length
        return span.at(jnp.where(count < span.total, FALLS["cosine"](done), 0))

    return fall


@open_ended
def inverse_sqrt(span, timescale=None):
    """Draws 1 / sqrt(count); see `lr_schedule`."""
    if timescale is not None:
        timescale = real(span.who, "timescale", timescale)
    scale = max(span.warmup, 1) if timescale is None else timescale
    shift = 0 if timescale is None else timescale - span.warmup
    check(
        scale > 0, f"{span.who}: timescale={timescale} must be positive; leave it out for the warmup's length"
    )

    def fall(count):
        rate = span.peak * jnp.sqrt(scale / jnp.maximum(count + shift, scale))
        over = False if span.total is None else count > span.total
        return jnp.where(over, span.final, jnp.maximum(rate, span.final))

    return fall


def wsd(span, decay=None, tail="linear"):
    """Draws the peak, and a tail of `decay` counts to final; see `lr_schedule`."""
    most = span.total - span.warmup
    if decay is not None:
        decay = real(span.who, "decay", decay)
    fits = decay is not None and 0 < decay <= most
    check(
        fits, f"{span.who}: decay={decay} must be from 1 to total - warmup = {most}; use {max(1, most // 5)}"
    )
    shape = choose("tail", tail, FALLS)
    return lambda count: span.at(shape(jnp.clip((count - (span.total - decay)) / decay, 0, 1)))


def _rates(who: str, **rates: Any) -> list[float]:
    rates = {name: real(who, name, rate) for name, rate in rates.items()}
    for name, rate in rates.items():
        check(rate >= 0, f"{who}: {name}={rate} must be a finite rate, not negative; use 0 or more")
        check(
            rate <= rates["peak"],
            f"{who}: {name}={rate} must not be above peak={rates['peak']}; use at most {rates['peak']}",
        )
    return list(rates.values())


def _lengths(who: str, total: Any, warmup: Any, open_ended: bool) -> tuple:
    warmup = real(who, "warmup", warmup)
    check(warmup >= 0, f"{who}: warmup={warmup} must not be negative; use 0 for none")
    check(
        open_ended or total is not None, f"{who}: its decay needs an end; give the length of the run as total"
    )
    if total is not None:
        total = real(who, "total", total)
        check(total > 0, f"{who}: total={total} must be positive; use 1 or more")
        check(warmup < total, f"{who}: warmup={warmup} must be below total={total}; use at most {total - 1}")
    return total, warmup
