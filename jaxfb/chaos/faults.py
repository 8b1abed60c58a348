"""Faults that a process makes to itself, by name: callbacks out of `jaxfb.guard.faults`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.callbacks import Callback
from jaxfb.guard.faults import AfterUpdate, with_flipped_bit

UPDATE = 6
"""The update, from 1, in which the faults happen: between two checkpoints of `runs.SMALL`."""


def nan_in_parameters() -> Callback:
    """Returns a parameter becomes nan, so that every later loss is."""
    return AfterUpdate(
        UPDATE, lambda state: _with_first(state, lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan))
    )


def wrong_once() -> Callback:
    """Returns a device gives one wrong bit once: all copies of an array agree in it."""
    return AfterUpdate(UPDATE, lambda state: _with_first(state, _flip_everywhere))


def wrong_again_and_again() -> Callback:
    """Makes every run of an update return other bits."""
    bits = count(1)
    flip = lambda leaf: _flip_everywhere(leaf, next(bits))  # noqa: E731
    return AfterUpdate(UPDATE, lambda state: _with_first(state, flip), times=3)


def one_copy_differs() -> Callback:
    """Returns one of several devices keeps another value than the others."""
    last = jax.devices()[-1].id
    return AfterUpdate(
        UPDATE, lambda state: _with_first(state, lambda leaf: with_flipped_bit(leaf, last, 0, 3))
    )


def spike() -> Callback:
    """Returns the parameters are thrown far away, so that the loss jumps."""
    return AfterUpdate(UPDATE + 3, lambda state: _with_first(state, lambda leaf: -30 * leaf))


FAULTS: dict[str, Callable[[], Callback]] = {
    make.__name__: make
    for make in (nan_in_parameters, wrong_once, wrong_again_and_again, one_copy_differs, spike)
}


def _with_first(state: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
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
