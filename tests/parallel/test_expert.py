"""Experts cut over devices compute what one device does, values and gradients: any routing, either way to exchange."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfb.hlo import collectives
from jaxfb.models.grouped_matmul import Kernels, grouped_matmul
from jaxfb.parallel import expert
from jaxfb.parallel.expert_rows import exchange as expert_exchange
from jaxfb.platforms.compat import equations

ONE, TURNS, OF_NARROW = (1,), expert.SHARES, expert.SHARES_OF_NARROW
TOKENS, CHOICES, WIDTH, EXPERTS, DEVICES = 12, 2, 3, 8, 4


def _routings():
    """i32[TOKENS, CHOICES] each: even, random, everything to two experts of one device, and with dropped choices."""
    draw = np.random.default_rng(0)
    different = np.stack([draw.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    return {
        "random": different,
        "one device": np.tile([7, 6], (TOKENS, 1)),
        "one expert each": np.stack([np.arange(TOKENS) % 4, 4 + np.arange(TOKENS) % 4], axis=1),
        "some to nobody": np.where(draw.random((TOKENS, CHOICES)) < 0.5, EXPERTS, different),
        "all to nobody": np.full((TOKENS, CHOICES), EXPERTS),
    }


def _layer(capacity, x, kernels, weights, chosen, shares=(1,), buffer=None):
    """The experts' matrices come once as the state, and once as what the function has by itself."""

    def run(rows, sizes, state):
        first, second = (grouped_matmul(rows.values, each, sizes) for each in (kernels, state))
        return rows.weights * jnp.sin(0.25 * first + 0.75 * second), state

    out, _ = expert.dispatch(
        run, kernels, x, chosen, weights, EXPERTS, kernels.shape[0], capacity, shares, buffer
    )
    return out


def _plain(x, kernels, weights, chosen):
    """Every expert for every token, of which each choice picks one."""
    every = jnp.sin(jnp.einsum("td,edf->tef", x, kernels))
    padded = jnp.concatenate([every, jnp.zeros_like(every[:, :1])], axis=1)
    return jnp.einsum("tk,tkd->td", weights, jnp.take_along_axis(padded, chosen[..., None], axis=1))


def _with_grads(layer, plain=True):
    """Values where nothing is differentiated, those where something is, and gradients."""

    def run(x, kernels, weights, chosen, cotangent):
        out, vjp = jax.vjp(lambda *args: layer(*args, chosen), x, kernels, weights)
        alone = layer(x, kernels, weights, chosen) if plain else out
        return alone, out, *vjp(cotangent)

    return run


def _over_devices(run, inputs, outputs, devices=DEVICES):
    mesh = jax.make_mesh(
        (devices,), ("expert",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    spec = P("expert")
    specs = {"in_specs": (spec,) * inputs, "out_specs": (spec,) * outputs if outputs > 1 else spec}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs, check_vma=False))


def _cut(layer, devices=DEVICES, plain=True):
    """The layer with tokens and experts over `expert`, and gradients of the experts left where they are."""
    return _over_devices(_with_grads(layer, plain), 5, 5, devices)


@pytest.fixture(autouse=True)
def _nothing_is_read_that_was_not_written(monkeypatch):
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.fixture(scope="module")
def inputs():
    draw = np.random.default_rng(1)
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH, WIDTH), (TOKENS, CHOICES), (TOKENS, WIDTH))
    return [draw.normal(size=shape) for shape in shapes]


def _check(run, inputs):
    *inputs, cotangent = inputs
    for name, chosen in _routings().items():
        wanted = _with_grads(_plain)(*inputs, jnp.asarray(chosen), cotangent)
        got = run(*inputs, chosen.astype(np.int32), cotangent)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    "devices, shares, buffer",
    [
        (1, TURNS, 0.5),
        (2, ONE, None),
        pytest.param(4, TURNS, None, marks=pytest.mark.slow),
        pytest.param(4, ONE, 0.5, marks=pytest.mark.slow),
        pytest.param(4, TURNS, 0.3, marks=pytest.mark.slow),
        pytest.param(4, OF_NARROW, 0.3, marks=pytest.mark.slow),
    ],
)
def test_no_token_is_lost_for_any_routing(inputs, devices, shares, buffer, monkeypatch):
    """Nor where a device has space for a part of its rows only, and they come in many rounds."""
    monkeypatch.setattr(expert, "TILE", 1)
    _check(_cut(lambda *args: _layer(None, *args, shares, buffer), devices), inputs)


def _exchanges(layer, inputs):
    """{numbers of a row: how many exchanges}; the loop for what has no space is left out, as it does not turn where
    experts are equally popular.
    """
    *inputs, cotangent = inputs
    lowered = _cut(layer, plain=False).lower(*inputs, _routings()["random"].astype(np.int32), cotangent)
    found = [one for one in collectives(lowered.compile().as_text()) if one.times]
    assert {one.kind for one in found} == {"all-gather", "all-to-all"}
    sizes = [one.bytes for one in found if one.kind == "all-to-all"]
    return {size // min(sizes): sizes.count(size) for size in sizes}


@pytest.mark.slow
def test_one_exchange_there_and_one_back(inputs, monkeypatch):
    """Forward and backward each, of rows; their weights go there and their gradients come back."""
    monkeypatch.setattr(expert, "TILE", 1)
    assert _exchanges(lambda *args: _layer(None, *args, ONE, 1.5), inputs) == {WIDTH: 4, 1: 2}


@pytest.mark.slow
def test_no_output_comes_back_where_a_layer_is_computed_again(inputs, monkeypatch):
    monkeypatch.setattr(expert, "TILE", 1)
    again = jax.checkpoint(lambda *args: _layer(None, *args, ONE, 1.5))
    assert _exchanges(again, inputs) == {WIDTH: 5, 1: 3}


def _ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What the documentation of `lax.ragged_all_to_all` says, written with an all-gather; NaN where sizes disagree."""
    me = lax.axis_index(axis_name)
    operands = lax.all_gather(operand, axis_name)
    starts, sizes, places = (
        lax.all_gather(values.reshape(len(operands), -1), axis_name)[:, me]
        for values in (input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for source, run in np.ndindex(starts.shape):
        place, size = places[source, run], sizes[source, run]
        moved = operands[source][jnp.clip(row - place + starts[source, run], 0, operand.shape[0] - 1)]
        here = ((row >= place) & (row < place + size)).reshape(-1, *[1] * (output.ndim - 1))
        output = jnp.where(here, moved, output)
    return jnp.where((sizes == recv_sizes.reshape(sizes.shape)).all(), output, jnp.nan)


@pytest.mark.slow
def test_the_ragged_exchange_of_other_platforms_is_the_same(inputs, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", _ragged_all_to_all)
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(expert, "TILE", 1)
    _check(_cut(lambda *args: _layer(None, *args, TURNS, 0.5)), inputs)


@pytest.mark.parametrize("shares", [ONE, TURNS])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_rows_of_a_short_dtype_are_exchanged_as_words(shares, is_ragged, monkeypatch):
    """Small whole numbers, which no sum and no product rounds."""
    if is_ragged:
        monkeypatch.setattr(lax, "ragged_all_to_all", _ragged_all_to_all)
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
    monkeypatch.setattr(expert, "TILE", 1)
    draw, width = np.random.default_rng(3), 2 * expert_exchange.LANES
    x, scales = (draw.integers(-3, 4, (size, width)).astype("bfloat16") for size in (TOKENS, EXPERTS))
    weights, chosen = draw.integers(1, 4, (TOKENS, CHOICES)).astype("float32"), _routings()["random"]

    def run(rows, sizes, scales):
        scale = jnp.repeat(scales, sizes, axis=0, total_repeat_length=len(rows.values))
        return (rows.values * scale * rows.weights).astype(rows.values.dtype), scales

    def layer(x, scales, weights, chosen):
        return expert.dispatch(
            run, scales, x, chosen, weights, EXPERTS, len(scales), None, shares, buffer=0.5
        )[0]

    seen, rows = [], expert_exchange.route
    monkeypatch.setattr(expert_exchange, "route", lambda *args: seen.append(args[0].shape) or rows(*args))
    args = x, scales, weights, chosen.astype(np.int32)
    np.testing.assert_array_equal(_over_devices(layer, 4, 1)(*args), layer(*args))
    assert {shape[1:] for shape in seen} == {(2, expert_exchange.LANES), (1,)}


def test_rows_become_words_before_each_choice_has_one(monkeypatch):
    """And outputs are rows again after those to a token are added up: a pass over tokens and not over choices."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
    x = jnp.ones((TOKENS, 2 * expert_exchange.LANES), jnp.bfloat16)
    kernels, weights = jnp.ones((EXPERTS, 1)), jnp.ones((TOKENS, CHOICES))

    def run(rows, sizes, state):
        return rows.values, state

    def layer(x, kernels, weights, chosen):
        out, vjp = jax.vjp(
            lambda x: expert.dispatch(run, kernels, x, chosen, weights, EXPERTS, len(kernels))[0], x
        )
        return vjp(out)[0]

    chosen = _routings()["random"].astype(np.int32)
    traced = jax.make_jaxpr(_over_devices(layer, 4, 1))(x, kernels, weights, chosen)
    tokens, forms = TOKENS // DEVICES, {x.shape[1:], expert_exchange.packed(x).shape[1:]}
    changed = [
        _shape(eqn)[0]
        for eqn in equations(traced.jaxpr)
        if eqn.primitive.name == "reshape" and {eqn.invars[0].aval.shape[1:], _shape(eqn)[1:]} == forms
    ]
    assert set(changed) == {tokens, DEVICES * tokens * CHOICES}  # space for all that can arrive


def test_no_zeros_are_written_for_rounds_that_do_not_turn(monkeypatch):
    """To add gradients of the experts' matrices to, which the first windows write whether there were rounds or not."""
    monkeypatch.undo()  # without the NaN that the fixture puts in place of `lax.empty`
    monkeypatch.setattr(expert, "TILE", 1)
    x, kernels, weights = (
        jnp.ones((TOKENS, WIDTH)),
        jnp.ones((EXPERTS, WIDTH, WIDTH)),
        jnp.ones((TOKENS, CHOICES)),
    )

    def run(rows, sizes, state):
        return state.multiply(rows.values, sizes)

    def layer(x, kernels, weights, chosen):
        def of(kernels):
            state = Kernels.of(kernels)
            return expert.dispatch(run, state, x, chosen, weights, EXPERTS, len(kernels), buffer=0.5)[0]

        return jax.vjp(of, kernels)[1](x)[0]

    chosen = _routings()["random"].astype(np.int32)
    traced = jax.make_jaxpr(_over_devices(layer, 4, 1))(x, kernels, weights, chosen)
    held = EXPERTS // DEVICES, WIDTH, WIDTH
    made = {eqn.primitive.name for eqn in equations(traced.jaxpr) if _shape(eqn) == held}
    assert "empty" in made and "broadcast_in_dim" not in made


def test_slots_are_filled_without_a_pass_over_them():
    """Those that are empty hold some row, which nobody reads; a choice without a slot adds nothing."""
    group, x = jnp.array([1, 2, 0, 2, 1, 1], jnp.int32), jnp.arange(1.0, 7.0)[:, None]  # group 2 is nobody's
    slots, counts = expert.sorted_slots(group, 2, 6, 2)
    assert counts.tolist() == [1, 2]
    moved = expert.move(x, slots)
    assert moved[:3, 0].tolist() == [3.0, 1.0, 5.0] and jnp.isin(moved, x).all()
    assert expert.collect(moved, slots, 1)[:, 0].tolist() == [1.0, 0.0, 3.0, 0.0, 5.0, 0.0]
    filled = [eqn for eqn in equations(jax.make_jaxpr(expert.move)(x, slots).jaxpr) if _shape(eqn) == x.shape]
    assert "select_n" not in {eqn.primitive.name for eqn in filled} and filled


def _shape(eqn):
    return eqn.outvars[0].aval.shape


class _Exchange(NamedTuple):
    """An exchange of a program.

    back: whether rows return from their experts.  width: of a row.
    after: what must be there before it starts: other exchanges by their place in the program, and "cotangent".
    """

    back: bool
    width: int
    after: frozenset


def _waits(jaxpr, given, found):
    """Adds a program's exchanges to `found`; returns what its results depend on, if its arguments depend on `given`.

    A call is followed into its program. All results of anything else depend on all its operands, which is what an
    optimization barrier is for.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))
    of = lambda atom: frozenset() if isinstance(atom, Literal) else known.get(atom, frozenset())  # noqa: E731
    for eqn in jaxpr.eqns:
        operands = list(map(of, eqn.invars))
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params), None)
        if inner is not None and eqn.primitive.name not in ("while", "scan"):
            results = _waits(getattr(inner, "jaxpr", inner), operands, found)
        else:
            after = frozenset().union(*operands)
            if eqn.primitive.name == "ragged_all_to_all":
                back = "expert_bring_back" in str(eqn.source_info.name_stack)
                found.append(_Exchange(back, eqn.outvars[0].aval.shape[-1], after))
                after |= {len(found) - 1}
            results = [after] * len(eqn.outvars)
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(of, jaxpr.outvars))


def _ragged_exchanges(run, args, monkeypatch):
    """The exchanges of a program as they are where XLA has a ragged all-to-all; its last argument is a cotangent."""
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))
    found = []
    given = [frozenset()] * (len(args) - 1) + [frozenset({"cotangent"})]
    _waits(jax.make_jaxpr(run)(*args).jaxpr, given, found)
    return found


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_of_outputs_are_sent_after_the_rows_are_here(inputs, monkeypatch, remat):
    """Also after those that a backward sends again: the gradients then travel during the products of these rows."""
    layer = lambda *args: _layer(None, *args)  # noqa: E731
    run = _cut(jax.checkpoint(layer) if remat else layer, plain=False)
    *inputs, cotangent = inputs
    args = *inputs, _routings()["random"].astype(np.int32), cotangent
    there = [(k, one) for k, one in enumerate(_ragged_exchanges(run, args, monkeypatch)) if not one.back]
    rows = [k for k, one in there if one.width == WIDTH and "cotangent" not in one.after]
    of_outputs = [one for _, one in there if "cotangent" in one.after]
    assert len(rows) == 1 + remat and [one.width for one in of_outputs] == [WIDTH]
    assert rows[-1] in of_outputs[0].after


@pytest.mark.parametrize("shares", [TURNS, OF_NARROW])
def test_a_turn_is_sent_after_the_one_before_it_is_here(inputs, monkeypatch, shares):
    x, kernels, weights, _ = inputs
    chosen = _routings()["random"].astype(np.int32)
    args = np.tile(x, (4, 1)), kernels, np.tile(weights, (4, 1)), np.tile(chosen, (4, 1))
    run = _over_devices(
        lambda x, kernels, weights, chosen: _layer(None, x, kernels, weights, chosen, shares), 4, 1
    )
    found = _ragged_exchanges(run, args, monkeypatch)
    back = [one.after for one in found if one.back]
    there = [k for k, one in enumerate(found) if not one.back]
    sent = [set(there[k : k + 2]) for k in range(0, len(there), 2)]  # rows and their weights
    assert len(sent) == len(back) == len(shares)
    for turn in range(1, len(shares)):
        assert all(sent[turn - 1] <= found[k].after for k in sent[turn]), turn
    for turn in range(len(shares) - 1):
        assert sent[turn + 1] <= back[turn], turn


def test_narrow_experts_have_larger_first_and_last_turns():
    """Whose products are shorter beside the way of the next rows."""
    assert expert.shares_for(16384) == TURNS and expert.shares_for(2048) == OF_NARROW
    assert OF_NARROW[0] / sum(OF_NARROW) > TURNS[0] / sum(TURNS)


def _with_another(x, kernels, weights, chosen, other):
    """The sum of the layer and of something else that may be computed while the first rows are sent."""

    def run(rows, sizes, state):
        return rows.weights * jnp.sin(grouped_matmul(rows.values, state, sizes)), state

    other = jnp.cos(other)
    out, beside = expert.dispatch(
        run, kernels, x, chosen, weights, EXPERTS, kernels.shape[0], shares=TURNS, beside=other
    )
    return out + beside


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_rows_travel_while_something_else_is_computed(inputs, monkeypatch, is_differentiated):
    """Also those that a backward sends again, whose outputs' gradients come after both."""
    x, kernels, weights, cotangent = inputs
    chosen, exchanges = _routings()["random"].astype(np.int32), []
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, default, **_: default(*args))

    def run(x, kernels, weights, chosen, other, cotangent):
        layer = lambda x, other: _with_another(x, kernels, weights, chosen, other)  # noqa: E731
        if not is_differentiated:
            return layer(x, other)
        return jax.vjp(jax.checkpoint(layer), x, other)[1](cotangent)[0]

    args = x, kernels, weights, chosen, np.ones_like(x), cotangent
    given = [frozenset()] * 4 + [frozenset({"other"}), frozenset({"cotangent"})]
    _waits(jax.make_jaxpr(_over_devices(run, 6, 1))(*args).jaxpr, given, exchanges)
    there = [one.after for one in exchanges if not one.back and one.width == WIDTH]
    first = [after for after in there if "cotangent" not in after][: 2 if is_differentiated else 1]
    assert not any("other" in after for after in first)
    assert len(there) > len(first) and all("other" in after for after in there[len(first) :])


def test_what_is_computed_beside_the_rows_has_its_own_gradient(inputs):
    """Which a token's choices do not change."""
    x, kernels, weights, cotangent = inputs
    chosen = _routings()["random"].astype(np.int32)

    def of(layer):
        def run(x, kernels, weights, chosen, cotangent):
            out, vjp = jax.vjp(lambda x, weights: layer(x, kernels, weights, chosen, x), x, weights)
            return out, *vjp(cotangent)

        return run

    wanted = of(lambda *args: _plain(*args[:4]) + jnp.cos(args[4]))(x, kernels, weights, chosen, cotangent)
    got = _over_devices(of(_with_another), 5, 3)(x, kernels, weights, chosen, cotangent)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "tokens, ends", [(8, (1, 4, 7, 8)), (3, (1, 2, 3)), (1, (1,)), (4096, (512, 2048, 3584, 4096))]
)
def test_every_piece_has_tokens(tokens, ends):
    assert expert.cut_points(tokens, (1, 3, 3, 1)) == ends and expert.cut_points(tokens, ONE) == (tokens,)


@pytest.mark.parametrize("shares", [ONE, pytest.param(TURNS, marks=pytest.mark.slow)])
def test_with_a_capacity_each_device_keeps_the_first_choices(inputs, shares):
    *inputs, cotangent = inputs
    got, *_ = _cut(lambda *args: _layer(1, *args, shares))(
        *inputs, _routings()["one device"].astype(np.int32), cotangent
    )
    everything = _plain(*inputs, jnp.asarray(_routings()["one device"]))
    first = np.arange(TOKENS) % (TOKENS // DEVICES) == 0
    np.testing.assert_allclose(got, np.where(first[:, None], everything, 0), rtol=0, atol=1e-13)


def test_experts_that_do_not_divide_are_refused(inputs):
    config = SimpleNamespace(num_experts=6)
    expert.check_expert_divides(config, 3)
    expert.check_expert_divides(SimpleNamespace(num_experts=0), 4)
    with pytest.raises(
        ValueError, match="num_experts=6 must be a multiple of expert=4; use num_experts=8 or expert=3"
    ):
        expert.check_expert_divides(config, 4)
    x, kernels, weights, _ = inputs
    with pytest.raises(ValueError, match="8 experts over expert=1 are 8 a device, the weights have 4"):
        _layer(None, x, kernels[:4], weights[:, :1], jnp.zeros((TOKENS, 1), jnp.int32))
