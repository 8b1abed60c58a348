"""Rows of experts for which a device has no space in its first windows, in a loop that usually does not turn.

A loop whose length depends on the routing cannot be differentiated, so its backward is a loop too: each round sends its
rows again and computes its outputs again. Memory is that of one round, however many there are.

Shapes: see `expert` and `expert_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxfb.hlo import SELDOM
from jaxfb.parallel.expert_rows.exchange import (
    Weighted,
    Window,
    empty_like,
    or_empty,
    route,
    route_back,
    starts,
)
from jaxfb.platforms.compat import custom_vjp

State = TypeVar("State")

# (rows of C sorted by expert, how many of each of this device's experts i32[L], state)
# -> (outputs times their weights [C, D], state).
# Where a state has no gradient yet, the backward of a loop begins with zeros, or with what a method `or_empty` of the
# state's parts returns (`models.grouped_matmul.Kernels`).
RunExperts = Callable[[Weighted, jax.Array, State], tuple[jax.Array, State]]


class Rounds(NamedTuple):
    """Lists what there is to exchange, the same on all devices of the axis.

    counts: i32[P, X, X, L], rows of each device for each device's experts in each turn.
    before: i32[P, X], rows of each device that come before those of a turn.
    first:  i32[P], space of the turn's first window.
    """

    counts: jax.Array
    before: jax.Array
    first: jax.Array

    def of_turns(self, space: int) -> jax.Array:
        """Returns how many further rounds each turn needs, i32[P]: as many as the device to which most rows come."""
        left = self.counts.sum((1, 3), dtype=jnp.int32).max(1) - self.first
        return jnp.maximum(0, -(-left // space))

    def window(self, number: jax.Array, space: int) -> Window:
        """Returns the window of a further round."""
        rounds = self.of_turns(space)
        turn = (number >= jnp.cumsum(rounds)).sum(dtype=jnp.int32)
        begin = jnp.asarray(self.first)[turn] + (number.astype(jnp.int32) - starts(rounds)[turn]) * space
        return Window.of(self.counts[turn], self.before[turn], begin, space)


def further_rounds(
    run: RunExperts[State], state: State, rows: Weighted, out: jax.Array, rounds: Rounds, space: int
) -> tuple[Weighted, jax.Array, State]:
    """Puts into `out` [S, D] the outputs for those of `rows` of S that are in no first window, `space` at a time.

    Returns (the rows for the next windows, out, what the last call of `run` returned).
    """
    sizes = jnp.zeros(rounds.counts.shape[-1], jnp.int32)
    # biases and adapters, which `run` holds itself
    empty = Weighted(*(empty_like(one, space) for one in rows))
    run, held = jax.closure_convert(run, empty, sizes, state)
    return _further(run, held, state, rows, out, rounds, space)


@custom_vjp(0, 6)
def _further(run, held, state, rows, out, rounds, space):
    def turn(number, carry):
        out, state = carry
        window = rounds.window(number, space)
        outputs, state = run(_routed(rows, window, space), window.sizes, state, *held)
        return route_back(outputs, window, out), state

    with jax.named_scope(SELDOM):
        return rows, *lax.fori_loop(0, rounds.of_turns(space).sum(), turn, (out, state))


def _further_forward(run, held, state, rows, out, rounds, space):
    # each with None where the other has a value
    moving = jax.tree.map(lambda leaf: leaf.value if leaf.perturbed else None, (held, state))
    still = jax.tree.map(lambda leaf: None if leaf.perturbed else leaf.value, (held, state))
    held, state, rows, out, rounds = jax.tree.map(lambda leaf: leaf.value, (held, state, rows, out, rounds))
    return _further(run, held, state, rows, out, rounds, space), (moving, still, rows, rounds)


def _further_backward(run, space, kept, cotangents):
    moving, still, rows, rounds = kept
    of_rows, of_out, of_state = cotangents
    of_rows = Weighted(*map(or_empty, of_rows))
    of_out, of_state = jax.tree.map(_number, (of_out, _state_or_empty(_like(of_state, moving[1]))))
    of_held = jax.tree.map(jnp.zeros_like, moving[0])

    def turn(number, carry):
        of_rows, of_held, of_state = carry
        window = rounds.window(number, space)

        def output(held, state, arrived):
            held, state = _joined((held, state), still)
            outputs, state = run(arrived, window.sizes, state, *held)
            return outputs, _like(state, moving[1])

        _, vjp = jax.vjp(output, *moving, _routed(rows, window, space))
        held, of_state, of_arrived = vjp((route(of_out, window, empty_like(of_out, space)), of_state))
        of_held = jax.tree.map(jnp.add, of_held, held)
        of_rows = [route_back(one, window, into) for one, into in zip(of_arrived, of_rows, strict=True)]
        return Weighted(*of_rows), of_held, of_state

    with jax.named_scope(SELDOM):
        turns = rounds.of_turns(space).sum()
        of_rows, of_held, of_state = lax.fori_loop(0, turns, turn, (of_rows, of_held, of_state))
    return of_held, of_state, of_rows, of_out, None


_further.defvjp(_further_forward, _further_backward, symbolic_zeros=True)


def _routed(rows: Weighted, window: Window, size: int) -> Weighted:
    return Weighted(*(route(one, window, empty_like(one, size)) for one in rows))


def _joined(first, other):
    return jax.tree.map(lambda one, two: two if one is None else one, first, other, is_leaf=_is_none)


def _like(tree, other):
    """Returns `tree` with None where `other` has it."""
    return jax.tree.map(lambda one, leaf: None if one is None else leaf, other, tree, is_leaf=_is_none)


def _state_or_empty(of_state):
    """Returns the gradients of a state; where its parts have a method `or_empty`, what that returns of theirs."""
    has_own = lambda node: hasattr(node, "or_empty")  # noqa: E731
    return jax.tree.map(lambda node: node.or_empty() if has_own(node) else node, of_state, is_leaf=has_own)


def _number(leaf: Any) -> jax.Array:
    if not isinstance(leaf, SymbolicZero):
        return leaf
    aval: Any = leaf.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _is_none(leaf) -> bool:
    return leaf is None
