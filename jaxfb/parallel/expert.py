"""The expert axis: each device holds some of the experts, and rows travel to the experts that they chose.

One exchange there and one back. Rows are sorted by expert, so what goes to one device lies together. Where rows
come from and go to is a `Slots`: both directions are gathers, forward and backward, and no scatter-add is made.

Shapes: T = tokens here, K = experts a token chose, N = T * K choices, S = slots, D = width, E = experts,
L = experts of this device, X = size of the axis. A choice of expert E is nobody's: it is not sent, and its
result is zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfb.compat import custom_vjp
from jaxfb.parallel.expert_exchange import AXIS, bring_back, send, take
from jaxfb.refusal import Refused

PyTree = Any

State = TypeVar("State")

# (rows [S, D] sorted by expert, how many of each of this device's experts i32[L], state) -> ([S, D], state)
RunExperts = Callable[[jax.Array, jax.Array, State], tuple[jax.Array, State]]

SHARES = (3, 13, 13, 3)
"""How the tokens of a microbatch are cut in pieces: only the first piece's way to the experts and the last one's way
back have nothing to hide beside, so these are small."""


def manual_size(axis: str = AXIS) -> int:
    """Returns size of the axis where this is traced, if collectives over it are written by hand there; otherwise 1."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape.get(axis, 1) == 1:
        return 1
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if types[axis] == AxisType.Manual else 1


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
            f"use num_experts {number + expert - number % expert} or expert {legal}",
            [{"num_experts": number + expert - number % expert}, {"expert": legal}],
        )


def dispatch(
    run: RunExperts[State],
    state: State,
    x: jax.Array,
    chosen: jax.Array,
    num_experts: int,
    num_local: int,
    capacity: int | None = None,
    shares: Sequence[int] = (1,),
) -> jax.Array:
    """Runs each token through its chosen experts: out[t, k] = expert chosen[t, k] of x[t].

    Without a capacity no choice is dropped, whatever the routing: buffers are as large as the worst case,
    all of a device's rows at one other. With one, an expert takes the first `capacity` choices of each device's
    tokens, and which those are depends on how rows were split over devices and microbatches.

    Args:
      run: applies this device's experts, once for each piece of the tokens.
      state: what the first call of `run` is given; the others are given what the one before returned.
      x: float[T, D].
      chosen: i32[T, K], different experts for one token; num_experts for nobody.
      num_experts: E.
      num_local: L; if less than E, the experts are cut over the manual axis `expert`, in order.
      capacity: rows that an expert takes from one device.
      shares: of the tokens in each piece. Pieces do not depend on each other, so a compiler can send one while
        the experts run another; where nothing is sent there is one piece.
    Returns:
      float[T, K, D]; zero where dropped.
    Raises:
      ValueError: num_local is not this device's share.
    """
    num_devices = _num_owners(num_experts, num_local)
    tokens, copies = chosen.shape
    ends = cut_points(tokens, shares if num_devices > 1 else (1,))
    if capacity is not None and len(ends) > 1:
        chosen = _within(capacity, chosen, num_experts)
    pieces = [
        _Piece.of(x[start:end], chosen[start:end], num_experts, num_local, capacity)
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    if num_devices == 1:
        out, _ = run(pieces[0].rows, pieces[0].counts, state)
        return pieces[0].answers(out, copies)
    with jax.named_scope("expert_counts"):
        mine = jnp.stack([piece.counts.reshape(num_devices, num_local) for piece in pieces])
        counts = lax.all_gather(mine, AXIS, axis=1)
    return jnp.concatenate(_in_turns(run, state, pieces, counts, copies))


def _in_turns(
    run: RunExperts[State], state: State, pieces: Sequence[_Piece], counts: jax.Array, copies: int
) -> list[jax.Array]:
    """Returns the answers to each piece. In a turn the experts run one piece, while the next one is sent and the
    answers to the one before come back; the next turn begins when all three are over.

    counts: i32[pieces, X, X, L], rows of each device for each device's experts.
    """
    last = len(pieces) - 1
    here, outs, back = pieces[0].sent(counts[0]), [], []
    for place, piece in enumerate(pieces):
        coming = pieces[place + 1].sent(counts[place + 1]) if place < last else None
        going = pieces[place - 1].brought_back(outs[-1], counts[place - 1]) if place else None
        out, state = _run_sorted(run, here, counts[place], piece.most, state)
        if last:
            here, out, going = _together((coming, out, going))
        outs.append(out)
        back += [going] if place else []
    back.append(pieces[last].brought_back(outs[-1], counts[last]))
    return [piece.answers(out, copies) for piece, out in zip(pieces, back, strict=True)]


@jax.custom_vjp
def _together(turn: PyTree) -> PyTree:
    """Returns the arrays of a turn when all of them are there.

    Only where nothing is differentiated, as where a layer is computed again in its backward. There the order is left
    to the compiler, which would otherwise start FSDP's scatters too late: six layers of Mixtral 8x22B on v5p:4x4x8
    took 0.908 s in place of 0.871 s.
    """
    return lax.optimization_barrier(turn)


_together.defvjp(lambda turn: (turn, None), lambda _, cotangents: (cotangents,))


def cut_points(tokens: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Returns where the pieces of `tokens` end, each of at least one token."""
    ends = [tokens * whole // sum(shares) for whole in itertools.accumulate(shares)]
    return tuple(sorted({end for end in ends if end} or {tokens}))


def _within(capacity: int, chosen: jax.Array, num_experts: int) -> jax.Array:
    """Returns the choices with num_experts in place of those that come after the first `capacity` of an expert."""
    slots, _ = sorted_slots(chosen.reshape(-1), num_experts, chosen.size, capacity)
    return jnp.where(slots.target.reshape(chosen.shape) < chosen.size, chosen, num_experts)


class _Piece(NamedTuple):
    """Some tokens of this device.

    rows:   [S, D], their choices sorted by expert.  slots: of the choices.
    counts: i32[E], rows of each expert.
    most:   rows that another device can be sent of them at most.
    """

    rows: jax.Array
    slots: Slots
    counts: jax.Array
    most: int

    @classmethod
    def of(cls, x, chosen, num_experts: int, num_local: int, capacity: int | None) -> _Piece:
        tokens, copies = chosen.shape
        capacity = tokens if capacity is None else min(capacity, tokens)
        num_slots = min(tokens * copies, num_experts * capacity)
        slots, counts = sorted_slots(chosen.reshape(-1), num_experts, num_slots, capacity)
        # a token goes to an expert once, so to a device at most as often as it has experts
        most = min(num_slots, num_local * capacity, tokens * min(copies, num_local))
        return cls(move(x, slots, copies), slots, counts, most)

    def sent(self, counts: jax.Array) -> jax.Array:
        """Returns what arrives here of everybody's, [X * most, D]; counts: i32[X, X, L]."""
        return send(self.rows, counts, self.most, self.rows.shape[0])

    def brought_back(self, out: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns the answers to `rows`, from those to what arrived everywhere."""
        return bring_back(out, counts, self.most, self.rows.shape[0])

    def answers(self, out: jax.Array, copies: int) -> jax.Array:
        """Returns the answers by token, [tokens, K, D]."""
        return move(out, self.slots.inverse).reshape(-1, copies, out.shape[1])


class Slots(NamedTuple):
    """A partial permutation of choices and slots, from either side.

    source: i32[S], the choice in each slot; N where it is empty.
    target: i32[N], the slot of each choice; S where it has none.
    """

    source: jax.Array
    target: jax.Array

    @property
    def inverse(self) -> Slots:
        return Slots(self.target, self.source)


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
    rank = place - take(_starts(asked), group)
    kept = (group < num_groups) & (rank < limit)
    target = jnp.where(kept, take(_starts(counts), group) + rank, num_slots)
    source = (
        jnp.full(num_slots, number, jnp.int32)
        .at[target]
        .set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    )
    return Slots(source, target), counts


@custom_vjp(2)
def move(x: jax.Array, slots: Slots, copies: int = 1) -> jax.Array:
    """Moves rows of x [N / copies, D], each repeated `copies` times, to their slots [S, D]; empty slots are zero."""
    return take(x, slots.source // copies)


def _move_forward(x, slots, copies):
    return take(x, slots.source // copies), slots


def _move_backward(copies, slots, cotangent):
    back = take(cotangent, slots.target)
    return back.reshape(-1, copies, back.shape[1]).sum(1), None


move.defvjp(_move_forward, _move_backward)


def _run_sorted(
    run: RunExperts[State], arrived: jax.Array, counts: jax.Array, most: int, state: State
) -> tuple[jax.Array, State]:
    """Calls `run` with what arrived [X * most, D] sorted by expert; the answers are in the order of the arrivals.

    counts: i32[X, X, L], rows of each device for each device's experts.
    """
    slots, sizes = _by_own_expert(counts, most)
    out, state = run(move(arrived, slots), sizes, state)
    return move(out, slots.inverse), state


def _by_own_expert(counts: jax.Array, most: int) -> tuple[Slots, jax.Array]:
    """Returns the order by expert of what arrived: [X * most], from each device a run sorted by expert, then
    padding.
    """
    mine = counts[:, lax.axis_index(AXIS)]
    place = jnp.arange(most, dtype=jnp.int32)
    expert = (place[None, :, None] >= jnp.cumsum(mine, axis=1)[:, None, :]).sum(-1, dtype=jnp.int32)
    number = expert.size
    return sorted_slots(expert.reshape(-1), mine.shape[1], number, number)


def _num_owners(num_experts: int, num_local: int) -> int:
    here = manual_size()
    if num_local != num_experts and num_local * here != num_experts:
        raise Refused(
            f"[expert] {num_experts} experts over expert={here} are {num_experts / here:g} a device, "
            f"the weights have {num_local}; cut their expert dim over the expert axis, evenly, or not at all"
        )
    return num_experts // num_local


def _starts(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts) - counts
