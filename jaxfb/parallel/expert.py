"""The expert axis: each device holds some of the experts, and rows travel to the experts that they chose.

One exchange there and one back. Rows are sorted by expert, so what goes to one device lies together. Where rows
come from and go to is a `Slots`: both directions are gathers, forward and backward, and no scatter-add is made.

Shapes: T = tokens here, K = experts a token chose, N = T * K choices, S = slots, D = width, E = experts,
L = experts of this device, X = size of the axis. A choice of expert E is nobody's: it is not sent, and its
result is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfb.compat import custom_vjp
from jaxfb.refusal import Refused

AXIS = "expert"

# (rows [S, D] sorted by expert, how many of each of this device's experts i32[L]) -> [S, D]
RunExperts = Callable[[jax.Array, jax.Array], jax.Array]


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
    run: RunExperts,
    x: jax.Array,
    chosen: jax.Array,
    num_experts: int,
    num_local: int,
    capacity: int | None = None,
) -> jax.Array:
    """Runs each token through its chosen experts: out[t, k] = expert chosen[t, k] of x[t].

    Without a capacity no choice is dropped, whatever the routing: buffers are as large as the worst case,
    all of a device's rows at one other. With one, an expert takes the first `capacity` choices of each device's
    tokens, and which those are depends on how rows were split over devices and microbatches.

    Args:
      run: applies this device's experts.
      x: float[T, D].
      chosen: i32[T, K], different experts for one token; num_experts for nobody.
      num_experts: E.
      num_local: L; if less than E, the experts are cut over the manual axis `expert`, in order.
      capacity: rows that an expert takes from one device.
    Returns:
      float[T, K, D]; zero where dropped.
    Raises:
      ValueError: num_local is not this device's share.
    """
    num_devices = _num_owners(num_experts, num_local)
    (tokens, copies), width = chosen.shape, x.shape[1]
    capacity = tokens if capacity is None else min(capacity, tokens)
    num_slots = min(tokens * copies, num_experts * capacity)
    slots, counts = sorted_slots(chosen.reshape(-1), num_experts, num_slots, capacity)
    rows = move(x, slots, copies)
    if num_devices == 1:
        out = run(rows, counts)
    else:
        # a token goes to an expert once, so to a device at most as often as it has experts
        most = min(num_slots, num_local * capacity, tokens * min(copies, num_local))
        out = _run_by_owners(run, rows, counts.reshape(num_devices, num_local), most)
    return move(out, slots.inverse).reshape(tokens, copies, width)


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
    rank = place - _take(_starts(asked), group)
    kept = (group < num_groups) & (rank < limit)
    target = jnp.where(kept, _take(_starts(counts), group) + rank, num_slots)
    source = (
        jnp.full(num_slots, number, jnp.int32)
        .at[target]
        .set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    )
    return Slots(source, target), counts


@custom_vjp(2)
def move(x: jax.Array, slots: Slots, copies: int = 1) -> jax.Array:
    """Moves rows of x [N / copies, D], each repeated `copies` times, to their slots [S, D]; empty slots are zero."""
    return _take(x, slots.source // copies)


def _move_forward(x, slots, copies):
    return _take(x, slots.source // copies), slots


def _move_backward(copies, slots, cotangent):
    back = _take(cotangent, slots.target)
    return back.reshape(-1, copies, back.shape[1]).sum(1), None


move.defvjp(_move_forward, _move_backward)


def _run_by_owners(run: RunExperts, rows: jax.Array, counts: jax.Array, most: int) -> jax.Array:
    """Calls `run` where the experts are: rows [S, D] sorted by expert, counts i32[X, L] of the experts of each
    device.
    """
    with jax.named_scope("expert_counts"):
        everybodys = lax.all_gather(counts, AXIS)
    arrived = _send(rows, everybodys, most, rows.shape[0])
    slots, sizes = _by_own_expert(everybodys, most)
    out = move(run(move(arrived, slots), sizes), slots.inverse)
    return _bring_back(out, everybodys, most, rows.shape[0])


def _by_own_expert(counts: jax.Array, most: int) -> tuple[Slots, jax.Array]:
    """Returns the order by expert of what arrived: [X * most], from each device a run sorted by expert, then
    padding.
    """
    mine = counts[:, lax.axis_index(AXIS)]
    place = jnp.arange(most, dtype=jnp.int32)
    expert = (place[None, :, None] >= jnp.cumsum(mine, axis=1)[:, None, :]).sum(-1, dtype=jnp.int32)
    number = expert.size
    return sorted_slots(expert.reshape(-1), mine.shape[1], number, number)


@custom_vjp(2, 3)
def _send(rows: jax.Array, counts: jax.Array, most: int, num_rows: int) -> jax.Array:
    """Sends rows [S, D], packed by owner, to their owners: [X * most, D], those of device x from x * most on.

    counts: i32[X, X, L], rows of each device for each device's experts.
    """
    return _route(rows, counts, most)


@custom_vjp(2, 3)
def _bring_back(out: jax.Array, counts: jax.Array, most: int, num_rows: int) -> jax.Array:
    """Sends rows back, the inverse and transpose of `_send`: [X * most, D] -> [S, D] on the devices that they came
    from.
    """
    return _route_back(out, counts, most, num_rows)


_send.defvjp(
    lambda rows, counts, most, num_rows: (_route(rows, counts, most), counts),
    lambda most, num_rows, counts, cotangent: (_route_back(cotangent, counts, most, num_rows), None),
)
_bring_back.defvjp(
    lambda out, counts, most, num_rows: (_route_back(out, counts, most, num_rows), counts),
    lambda most, num_rows, counts, cotangent: (_route(cotangent, counts, most), None),
)


class _Plan(NamedTuple):
    """The exchange of this device with each other, all i32[X]: its own rows that go there, where they start;
    rows that come from there, and where they start there."""

    sent: jax.Array
    start: jax.Array
    received: jax.Array
    start_there: jax.Array


def _plan(counts) -> _Plan:
    sizes, me = counts.sum(-1), lax.axis_index(AXIS)
    starts = jnp.cumsum(sizes, axis=1) - sizes
    return _Plan(sizes[me], starts[me], sizes[:, me], starts[:, me])


def _route(rows, counts, most):
    """Exchanges rows between devices; XLA for CPUs has no ragged all-to-all, so there each part is padded to the
    worst case.
    """
    plan = _plan(counts)
    num_devices, number = counts.shape[0], rows.shape[0]

    def ragged(rows):
        at = jnp.full(num_devices, lax.axis_index(AXIS) * most, jnp.int32)
        empty = jnp.zeros((num_devices * most, rows.shape[1]), rows.dtype)
        return lax.ragged_all_to_all(rows, empty, plan.start, plan.sent, at, plan.received, axis_name=AXIS)

    def padded(rows):
        place = jnp.arange(most, dtype=jnp.int32)
        index = jnp.where(place < plan.sent[:, None], plan.start[:, None] + place, number)
        return lax.all_to_all(_take(rows, index.reshape(-1)), AXIS, 0, 0, tiled=True)

    with jax.named_scope("expert_send"):
        return lax.platform_dependent(rows, cpu=padded, default=ragged)


def _route_back(out, counts, most, num_rows):
    plan = _plan(counts)

    def ragged(out):
        start = jnp.arange(counts.shape[0], dtype=jnp.int32) * most
        empty = jnp.zeros((num_rows, out.shape[1]), out.dtype)
        return lax.ragged_all_to_all(
            out, empty, start, plan.received, plan.start_there, plan.sent, axis_name=AXIS
        )

    def padded(out):
        place = jnp.arange(num_rows, dtype=jnp.int32)
        owner = (place[:, None] >= jnp.cumsum(plan.sent)).sum(1)
        index = owner * most + place - _take(plan.start, owner)
        index = jnp.where(owner < plan.sent.shape[0], index, out.shape[0])
        return _take(lax.all_to_all(out, AXIS, 0, 0, tiled=True), index)

    with jax.named_scope("expert_bring_back"):
        return lax.platform_dependent(out, cpu=padded, default=ragged)


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


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], and zero where the index is len(x)."""
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)
