"""Weight decay: how much (a ramp, like the learning rate) and on which leaves. Part of "one update"."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfb.optim.choose import check, choose, real
from jaxfb.optim.learning_rate import RISES, UNITS, Schedule
from jaxfb.optim.leaves import has_word, layer_ndims
from jaxfb.types import PyTree

RAMPS = {"constant": jnp.ones_like, "linear": RISES["linear"], "cosine": RISES["cosine"]}


def weight_decay_schedule(
    name: str, *, initial: float, final: float, total: int, unit: str = "updates"
) -> Schedule:
    """Makes a schedule of weight decay that rises from `initial` at count 0 to `final` at `total` and stays there
    (Megatron's).

    name: constant (both values must be equal), linear or cosine.
    unit: "updates" or "samples", as in `lr_schedule`. Raises ValueError for numbers that make no ramp.
    """
    rise = choose("weight-decay ramp", name, RAMPS)
    who = f"weight_decay_schedule({name!r})"
    choose("unit", unit, UNITS)
    initial, final = real(who, "initial", initial), real(who, "final", final)
    steps = real(who, "total", total)
    check(0 <= initial, f"{who}: initial={initial} must not be negative; use 0")
    check(initial <= final, f"{who}: initial={initial} must not be above final={final}; use at most {final}")
    check(
        name != "constant" or initial == final, f"{who}: initial={initial} is not final={final}; use 'linear'"
    )
    check(steps > 0, f"{who}: total={total} must be positive; use 1 or more")
    return Schedule(
        lambda count: initial + (final - initial) * rise(jnp.clip(count / steps, 0, 1)), unit, steps
    )


def decay_mask(params: PyTree) -> PyTree:
    """Returns the default mask: weight decay on matrices only. Tree of bool like `params`.

    Not decayed: leaves with fewer than two dimensions in one layer, and leaves with "embed", "norm" or "bias"
    in a name of their path.
    """

    def decays(path, ndim):
        return ndim >= 2 and not has_word(path, "embed", "norm", "bias")

    return jax.tree_util.tree_map_with_path(decays, layer_ndims(params))
