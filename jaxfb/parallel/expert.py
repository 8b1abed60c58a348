"""The expert axis: each device holds some of the experts, and rows travel to the experts that they chose.

One exchange there and one back. Rows are sorted by expert, so what goes to one device lies together, and arrives
sorted. The weight of each choice travels with its row, and outputs come back multiplied by it: so a backward needs no
outputs, and where a layer is computed again in it, none is computed and none comes back. Where rows come from and go to
is a `Slots`: both directions are gathers, forward and backward, and no scatter-add is made. Rows for which a device has
no space go in further rounds (`expert_rounds`).

Shapes: T = tokens here, K = experts a token chose, N = T * K choices, S = slots, D = width, E = experts,
L = experts of this device, X = size of the axis, P = turns. A choice of expert E is nobody's: it is not sent, and its
result is zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.parallel.expert_rows.exchange import (
    AXIS,
    Weighted,
    Window,
    all_computed,
    bring_back,
    empty_like,
    packed,
    send_weighted,
    starts,
    take,
    unpacked,
)
from jaxfb.parallel.expert_rows.rounds import Rounds, RunExperts, State, further_rounds
from jaxfb.parallel.expert_rows.turns import where_not_differentiated
from jaxfb.parallel.tensor import manual_size
from jaxfb.platforms.compat import custom_vjp
from jaxfb.refusal import Refused

PyTree = Any

SHARES, SHARES_OF_NARROW = (3, 13, 13, 3), (7, 18, 7)
"""How the tokens of a microbatch are cut where they are exchanged in turns: only the first part's way to the experts
and the last one's way back have no product of an expert to hide beside, so these are small. The products of the part
before it hide the way of the next one, of which narrow experts have fewer: there the first and the last are larger."""
NARROW = 4096
"""The largest width of a narrow expert: the products of a row last three times as long as its way on v5p if its expert
is 2048 wide, and 22 times if 16384."""
TILE = 128  # rows; space is a multiple of it


def shares_for(width: int) -> tuple[int, ...]:
    """Returns how tokens are cut into turns for experts of this width."""
    return SHARES_OF_NARROW if width <= NARROW else SHARES


def check_expert_divides(config: Any, expert: int) -> None:
    """Refuses a transformer whose experts the `expert` axis does not divide; a dense one knows no such axis.

    Args:
      config: a TransformerConfig.
      expert: size of the mesh axis.
    Raises:
      ValueError: names both numbers and the nearest legal choice.
    """
    number = config.num_experts
    if number and number % expert:
        legal = max(size for size in range(1, expert + 1) if number % size == 0)
        raise Refused(
            f"[expert] num_experts={number} must be a multiple of expert={expert}; "
            f"use num_experts={number + expert - number % expert} or expert={legal}",
            [{"num_experts": number + expert - number % expert}, {"expert": legal}],
        )


def dispatch(
    run: RunExperts[State],
    state: State,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    num_experts: int,
    num_local: int,
    capacity: int | None = None,
    shares: Sequence[int] = (1,),
    buffer: float | None = None,
    beside: PyTree = (),
) -> tuple[jax.Array, PyTree]:
    """Runs each token through its chosen experts: out[t] = sum over k of weights[t, k] * expert chosen[t, k] of x[t].

    Without a capacity no choice is dropped, whatever the routing. With one, an expert takes the first `capacity`
    choices of each device's tokens, and which those are depends on how rows were split over devices and microbatches.

    Args:
      run: applies this device's experts to the rows of a window, and multiplies each output by its row's weight.
      state: what the first call of `run` is given; the others are given what the one before returned.
      x: float[T, D].
      chosen: i32[T, K], different experts for one token; num_experts for nobody.
      weights: float[T, K], of each choice's output in the sum.
      num_experts: E.
      num_local: L; if less than E, the experts are cut over the manual axis `expert`, in order.
      capacity: rows that an expert takes from one device.
      shares: of the tokens in each turn. Turns do not depend on each other, so a compiler can send the rows of one
        while the experts run another; where nothing is sent, or differentiated, there is one turn.
      buffer: rows for which a device has space at a time, over those that it meets where all experts are equally
        popular; the others follow in further rounds. None: space for the worst case, all rows at one device.
      beside: arrays that do not depend on the experts, to be computed while the first rows are sent; with several
        shares alone.
    Returns:
      (float[T, D], to which a dropped choice adds nothing; the arrays of `beside`).
    Raises:
      ValueError: num_local is not this device's share.
    """
    of_experts = {"num_experts": num_experts, "num_devices": _num_owners(num_experts, num_local)}
    once = partial(_dispatch, run, **of_experts, capacity=capacity, buffer=buffer)
    given = state, x, chosen, weights
    if of_experts["num_devices"] == 1 or len(shares) == 1:
        return once(*given, ())[0], beside
    return where_not_differentiated(partial(once, shares=shares), once, *given, beside)


def of_all_experts(total: jax.Array, num_experts: int, num_local: int) -> jax.Array:
    """Returns the sum over all experts of what this device has computed of its own, such as a penalty on their weights.

    num_experts, num_local: as for `dispatch`; where they are equal, the total is that of all experts already.
    """
    return total if _num_owners(num_experts, num_local) == 1 else lax.psum(total, AXIS)


def _dispatch(
    run, state, x, chosen, weights, beside, num_experts, num_devices, capacity, buffer, shares=(1,)
):
    tokens, copies = chosen.shape
    ends = cut_points(tokens, shares)
    limit = tokens if capacity is None else min(capacity, tokens)
    if limit < tokens and len(ends) > 1:
        chosen = _within(limit, chosen, num_experts)
    turn = np.searchsorted(np.array(ends), np.arange(tokens), side="right")[:, None]
    group = jnp.where(
        chosen < num_experts, chosen + (turn * num_experts).astype(np.int32), len(ends) * num_experts
    )
    num_slots = min(tokens * copies, num_experts * limit)
    slots, counts = sorted_slots(group.reshape(-1), len(ends) * num_experts, num_slots, limit)
    if num_devices > 1:
        x = packed(x)  # here a token is one row; behind `move` it has one for each of its choices
    rows = Weighted(move(x, slots, copies), move(weights.reshape(-1, 1), slots))
    if num_devices == 1:
        out, _ = run(rows, counts, state)
    else:
        allotted = spaces(tokens, copies, num_experts, num_devices, capacity, shares, buffer)
        counts = counts.reshape(len(ends), num_devices, -1)
        out, beside = _exchanged(run, state, rows, _gathered(counts), allotted, beside)
    return unpacked(collect(out, slots, copies)), beside


def _gathered(counts: jax.Array) -> jax.Array:
    """Returns everybody's counts, i32[P, X, X, L], rows of each device for each device's experts."""
    with jax.named_scope("expert_counts"):
        return lax.all_gather(counts, AXIS, axis=1)


class Space(NamedTuple):
    """The rows of a turn for which a device has space, those that come where all experts are equally popular, and those
    that can come at most.
    """

    rows: int
    even: int
    most: int


def spaces(
    tokens: int,
    copies: int,
    num_experts: int,
    num_devices: int,
    capacity: int | None = None,
    shares: Sequence[int] = (1,),
    buffer: float | None = None,
) -> list[Space]:
    """Returns the space of each turn; arguments as of `dispatch`, T, K, E and X."""
    ends = cut_points(tokens, shares if num_devices > 1 else (1,))
    return [
        _space(end - start, copies, num_experts, num_devices, capacity, buffer)
        for start, end in zip((0, *ends), ends, strict=False)
    ]


def _space(tokens, copies, num_experts, num_devices, capacity, buffer) -> Space:
    limit, num_local = tokens if capacity is None else min(capacity, tokens), num_experts // num_devices
    even = min(tokens * copies, num_experts * limit)
    if num_devices == 1:
        return Space(even, even, even)
    # a token goes to an expert once, so to a device at most as often as it has experts
    most = num_devices * min(even, num_local * limit, tokens * min(copies, num_local))
    rows = most if buffer is None else -(-math.ceil(buffer * even) // TILE) * TILE
    return Space(min(rows, most), even, most)


def _exchanged(
    run: RunExperts[State],
    state: State,
    rows: Weighted,
    counts: jax.Array,
    allotted: Sequence[Space],
    beside: PyTree = (),
) -> tuple[jax.Array, PyTree]:
    """Returns (the expert outputs for the rows of S, both `packed`; `beside`).

    In a turn the experts run one window, while the next one is sent and the outputs of the one before come back; the
    next turn begins when all three are over. The first one begins when its rows are here and `beside` is computed.

    What does not fit into the first windows follows them. So FSDP's gathers and scatters have the products of a layer's
    backward beside them, which XLA does not let stand beside a loop that exchanges something.
    """
    run = run_packed(run)
    out, last = empty_like(rows.values), len(allotted) - 1
    of_turns = starts(counts.sum((2, 3), dtype=jnp.int32))  # i32[P, X]
    windows = [Window.of(counts[i], of_turns[i], 0, space.rows) for i, space in enumerate(allotted)]
    arrived, outputs = [], []
    for place in range(-1, last + 2):
        if place < last:
            here, rows = send_weighted(rows, windows[place + 1], allotted[place + 1].rows)
            if place < 0 and (last or jax.tree.leaves(beside)):
                here, rows, beside = all_computed((here, rows, beside))
            arrived.append(here)
        if place > 0:
            before = place - 1
            out = bring_back(
                outputs[before], windows[before], out, allotted[before].rows, arrived[before].values
            )
        if 0 <= place <= last:
            output, state = run(arrived[place], windows[place].sizes, state)
            outputs.append(output)
        if last and 0 <= place <= last:
            # started together, they are over together, and what is sent next starts behind them
            together = arrived[-1], outputs[-1], out, rows
            arrived[-1], outputs[-1], out, rows = lax.optimization_barrier(together)
    if any(space.rows < space.most for space in allotted):
        first = jnp.array([space.rows for space in allotted], jnp.int32)
        rows, out, state = further_rounds(
            run, state, rows, out, Rounds(counts, of_turns, first), max(allotted).rows
        )
    return out, beside


def run_packed(run: RunExperts[State]) -> RunExperts[State]:
    """Returns the same for rows that are `packed`."""

    def of_packed(rows: Weighted, sizes: jax.Array, state: State) -> tuple[jax.Array, State]:
        outputs, state = run(Weighted(unpacked(rows.values), rows.weights), sizes, state)
        return packed(outputs), state

    return of_packed


def cut_points(tokens: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Returns where the tokens of each turn end; each has at least one."""
    ends = [tokens * whole // sum(shares) for whole in itertools.accumulate(shares)]
    return tuple(sorted({end for end in ends if end} or {tokens}))


def _within(capacity: int, chosen: jax.Array, num_experts: int) -> jax.Array:
    """Returns the choices with num_experts in place of those that come after the first `capacity` of an expert."""
    slots, _ = sorted_slots(chosen.reshape(-1), num_experts, chosen.size, capacity)
    return jnp.where(slots.target.reshape(chosen.shape) < chosen.size, chosen, num_experts)


class Slots(NamedTuple):
    """A partial permutation of choices and slots, from either side.

    source: i32[S], the choice in each slot; N where it is empty.
    target: i32[N], the slot of each choice; S where it has none.
    """

    source: jax.Array
    target: jax.Array


def sorted_slots(group: jax.Array, num_groups: int, num_slots: int, limit: int) -> tuple[Slots, jax.Array]:
    """Returns slots in the order of `group` i32[N], at most `limit` of a group; and how many of each,
    i32[num_groups].
    """
    number = group.shape[0]
    order = jnp.argsort(group, stable=True)
    place = (
        jnp.zeros(number, jnp.int32).at[order].set(jnp.arange(number, dtype=jnp.int32), unique_indices=True)
    )
    asked = jnp.zeros(num_groups, jnp.int32).at[group].add(1, mode="drop")
    counts = jnp.minimum(asked, limit)
    rank = place - take(starts(asked), group)
    kept = (group < num_groups) & (rank < limit)
    target = jnp.where(kept, take(starts(counts), group) + rank, num_slots)
    source = (
        jnp.full(num_slots, number, jnp.int32)
        .at[target]
        .set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    )
    return Slots(source, target), counts


@custom_vjp(2)
def move(x: jax.Array, slots: Slots, copies: int = 1) -> jax.Array:
    """Moves rows of x [N / copies, D], each repeated `copies` times, to their slots [S, D].

    An empty slot gets a row of x that is never read; filling it with zeros would take another pass over all slots.
    """
    source = lax.div(slots.source, jnp.asarray(copies, slots.source.dtype))
    return jnp.take(x, source, axis=0, mode="clip")


@custom_vjp(2)
def collect(x: jax.Array, slots: Slots, copies: int) -> jax.Array:
    """Adds up the `copies` slots of each row [S, D] -> [N / copies, D]: the transpose of `move`."""
    back = take(x, slots.target)
    return back.reshape(-1, copies, *back.shape[1:]).sum(1)


move.defvjp(
    lambda x, slots, copies: (move(x, slots, copies), slots),
    lambda copies, slots, cotangent: (collect(cotangent, slots, copies), None),
)
collect.defvjp(
    lambda x, slots, copies: (collect(x, slots, copies), slots),
    lambda copies, slots, cotangent: (move(cotangent, slots, copies), None),
)


def _num_owners(num_experts: int, num_local: int) -> int:
    here = manual_size(AXIS)
    if num_local != num_experts and num_local * here != num_experts:
        raise Refused(
            f"[expert] {num_experts} experts over expert={here} are {num_experts / here:g} a device, "
            f"the weights have {num_local}; cut their expert dim over the expert axis, evenly, or not at all"
        )
    return num_experts // num_local
