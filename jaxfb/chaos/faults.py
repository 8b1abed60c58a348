"""The faults that a process of `jaxfb chaos` makes to itself, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.callbacks import Callback
from jaxfb.chaos.injectors import AfterUpdate, with_flipped_bit

UPDATE = 6
"""The update, from 1, in which the faults happen: between two checkpoints of `jobs.TRAIN`."""
_SPIKE = UPDATE + 3
ENOUGH = _SPIKE + 1
"""The updates of a run in which every fault happens and is noticed."""


def nan_in_parameters() -> Callback:
    """Sets one number of a parameter to nan, so that every later loss is nan."""
    return AfterUpdate(
        UPDATE, lambda state: _with_largest(state, lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan))
    )


def wrong_once() -> Callback:
    """Flips one bit of a parameter once, in all its copies alike, as after a wrong result of a device."""
    return AfterUpdate(UPDATE, lambda state: _with_largest(state, _flip_everywhere))


def wrong_again_and_again() -> Callback:
    """Flips another bit after each of the three runs of an update, as if it were not deterministic."""
    bits = count(1)
    flip = lambda leaf: _flip_everywhere(leaf, next(bits))  # noqa: E731
    return AfterUpdate(UPDATE, lambda state: _with_largest(state, flip), times=3)


def one_copy_differs() -> Callback:
    """Flips one bit of a parameter on the last device alone, so that its copy differs from the others."""
    last = jax.devices()[-1].id
    return AfterUpdate(
        UPDATE, lambda state: _with_largest(state, lambda leaf: with_flipped_bit(leaf, last, 0, 3))
    )


def spike() -> Callback:
    """Multiplies a parameter by -30, so that the loss of the next update jumps."""
    return AfterUpdate(_SPIKE, lambda state: _with_largest(state, lambda leaf: -30 * leaf))


FAULTS: dict[str, Callable[[], Callback]] = {
    make.__name__: make
    for make in (nan_in_parameters, wrong_once, wrong_again_and_again, one_copy_differs, spike)
}


def _with_largest(state: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Returns the state with its largest parameter changed."""
    leaves, structure = jax.tree.flatten(state.params)
    largest = max(range(len(leaves)), key=lambda index: leaves[index].size)
    leaves[largest] = jax.device_put(change(leaves[largest]), leaves[largest].sharding)
    return dataclasses.replace(state, params=jax.tree.unflatten(structure, leaves))


def _flip_everywhere(leaf: jax.Array, bit: int = 3) -> jax.Array:
    whole = jax.device_get(leaf).copy()
    words = whole.reshape(-1).view("u4")
    words[0] ^= 1 << bit
    return jnp.asarray(whole)
