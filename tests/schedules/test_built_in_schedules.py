"""The built-in kinds: rules that every table obeys, and the formulas each promises."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfb.schedules import KINDS, NAMES, make
from jaxfb.schedules.replay import replay
from jaxfb.schedules.sizes import checked_pieces, checked_sizes

PIPED = [name for name in NAMES if name != "gpipe"]
IN_A_V = ("v_shape", "zb_v", "v_half", "v_min", "dualpipe_v")
SHARED = [name for name in NAMES if not KINDS[name].by_device]


@st.composite
def sizes(draw, names=NAMES):
    """(name, P, M, V), M from one to beyond three times P."""
    name = draw(st.sampled_from(names))
    num_stages = draw(st.integers(1, 8))
    num_microbatches = draw(st.integers(1, 3 * num_stages + 1))
    return name, num_stages, num_microbatches, 2 if name in IN_A_V else draw(st.integers(1, 4))


def num_forward_ticks(num_stages, num_microbatches, num_chunks):
    """The fewest that lockstep allows: fill the pipe once or, with few microbatches, follow the last one."""
    return max(num_microbatches * num_chunks + num_stages - 1, num_stages * num_chunks + num_microbatches - 1)


def simulated(name, num_stages, num_microbatches, num_chunks=1, **costs):
    return make(name, num_stages, num_microbatches, num_chunks).simulate(**costs)


@pytest.mark.parametrize(
    ("given", "choices"),
    [
        ((8, 1000, 100), [{"num_microbatches": 617}, {"num_chunks": 62}]),
        ((64, 100_000, 1), [{"num_microbatches": 7748}]),
        ((1, 400_000, 3), [{"num_microbatches": 166_665}, {"num_chunks": 1}]),
        ((1000, 1000, 20), [{"num_stages": 64, "num_microbatches": 256, "num_chunks": 16}]),
        ((4, 10**9, 1), [{"num_microbatches": 2**16}]),
        ((4, 10**9, 1001), [{"num_microbatches": 1}]),
    ],
    ids=str,
)
def test_a_table_too_large_is_refused_with_sizes_that_fit(given, choices):
    with pytest.raises(ValueError, match="500000") as refused:
        checked_sizes(*given)
    assert list(refused.value.choices) == choices


def test_more_pieces_than_a_table_takes_are_refused_with_those_it_takes():
    with pytest.raises(ValueError, match="use num_pieces=312$"):
        checked_pieces(8, 100, 2, 313)
    assert checked_pieces(8, 100, 2, 312) == 312


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_each_action_runs_once_and_nothing_runs_before_its_input(size):
    name, num_stages, num_microbatches, num_chunks = size
    schedule = make(*size)
    when = {}
    for tick, row in enumerate(schedule.table):
        assert len(row) == num_stages
        for device, cell in enumerate(row):
            assert len({action.kind for action in cell}) == len(cell)
            for kind, microbatch, chunk in cell:
                key = kind, microbatch, schedule.stage_of(device, chunk)
                assert key not in when
                when[key] = tick
    last = num_stages * num_chunks - 1
    kinds = "FBW" if KINDS[name].splits_backward else "FB"
    assert len(when) == len(kinds) * num_microbatches * (last + 1)
    for (kind, m, stage), tick in when.items():
        if kind == "F" and stage > 0:
            assert when["F", m, stage - 1] < tick
        if kind == "B":
            assert when["F", m, stage] <= tick
            assert stage == last or when["B", m, stage + 1] < tick
        if kind == "W":
            assert when["B", m, stage] <= tick


@settings(max_examples=150, deadline=None)
@given(sizes())
def test_program_executes_the_table_and_overwrites_no_live_slot(size):
    schedule = make(*size)
    for each in (schedule, schedule.forward_only()):
        assert sorted(replay(each.program, each.placement)) == sorted(each.ticks)
        assert each.validate() is each
    assert schedule.forward_only().program.num_residual_slots == 0


@settings(max_examples=150, deadline=None)
@given(sizes(SHARED))
def test_time_is_the_least_that_lockstep_allows(size):
    name, num_stages, num_microbatches, num_chunks = size
    forward, backward_input, backward_weight = Fraction(3), Fraction(5), Fraction(7)
    result = simulated(*size, forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    ticks = num_forward_ticks(num_stages, num_microbatches, num_chunks)
    if name == "v_shape":
        ticks = 2 * (num_microbatches + num_stages - 1)
    chain = forward + backward_input + (0 if name == "zero_bubble" else backward_weight)
    weights = num_microbatches * backward_weight if name == "zero_bubble" else 0
    assert result.time == Fraction(ticks, num_chunks) * chain + weights
    assert result.bubble_fraction == 1 - result.ideal_time / result.time


@settings(max_examples=100, deadline=None)
@given(sizes())
def test_weight_gradients_are_accumulated_in_the_order_of_microbatches(size):
    """So that sums are the same bits under every schedule."""
    schedule = make(*size)
    reader = "W" if schedule.splits_backward else "B"
    order = [(stage, m) for kind, m, stage in schedule.ticks if kind == reader]
    for stage in range(size[1] * size[3]):
        assert [m for s, m in order if s == stage] == list(range(size[2]))


@settings(max_examples=60, deadline=None)
@given(sizes(SHARED))
def test_phases_are_few_and_hold_exactly_the_kinds_of_their_ticks(size):
    schedule = make(*size)
    assert len(schedule.phases) <= 4
    assert [p.start for p in schedule.phases] == [0, *(p.stop for p in schedule.phases)][:-1]
    for start, stop, kinds in schedule.phases:
        for row in schedule.table[start:stop]:
            assert {action.kind for cell in row for action in cell} == set(kinds)


@pytest.mark.parametrize(
    "name, num_chunks, peaks",
    [
        ("1f1b", 1, (7, 5, 3, 1)),
        ("interleaved", 2, (11, 9, 7, 5)),
        ("zero_bubble", 1, (7, 6, 5, 4)),
        ("zero_bubble", 2, (11, 10, 9, 8)),
        ("v_shape", 2, (8, 8, 8, 8)),
        ("gpipe", 1, (8, 8, 8, 8)),
        ("gpipe", 2, (16, 16, 16, 16)),
    ],
)
def test_peaks_of_4_stages_and_8_microbatches(name, num_chunks, peaks):
    assert simulated(name, 4, 8, num_chunks).peak_live_activations == peaks


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_interleaved_follows_its_formulas(num_stages, num_chunks):
    num_microbatches = 3 * num_stages
    schedule = make("interleaved", num_stages, num_microbatches, num_chunks)
    fill = num_stages * num_chunks - 1
    both = num_microbatches * num_chunks - num_stages * num_chunks + num_stages
    lengths = [(phase.num_ticks, phase.kinds) for phase in schedule.phases]
    assert lengths == [(n, kinds) for n, kinds in ((fill, "F"), (both, "FB"), (fill, "B")) if n]
    result = schedule.simulate()
    idle = (num_stages - 1) / (num_microbatches * num_chunks)  # as Megatron counts it
    assert result.time / result.ideal_time - 1 == pytest.approx(idle)
    first = num_stages * num_chunks + num_stages - 1
    assert result.peak_live_activations == tuple(first - 2 * d for d in range(num_stages))


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("name", PIPED)
def test_buffers_are_flat_in_the_number_of_microbatches(name, num_chunks):
    num_chunks = 2 if name in IN_A_V else num_chunks
    schedules = [make(name, 4, m, num_chunks) for m in (8, 32, 64)]
    slots = [schedule.slots.num for schedule in schedules]
    assert slots[0] == slots[1] == slots[2]
    if name in SHARED:  # else an input may wait for the device to be free
        assert max(slots[0]["activation"]) == max(slots[0]["gradient"]) == 1
    for buffer in ("residual", "cotangent"):  # what a bubble writes needs no slot of its own
        assert schedules[1].program.allocated(buffer) == max(slots[1][buffer])


def test_zero_bubble_needs_no_more_residual_slots_than_1f1b():
    for num_stages, num_chunks in ((2, 1), (4, 1), (4, 2), (8, 3)):
        sizes = (num_stages, 3 * num_stages, num_chunks)
        programs = [make(name, *sizes).program for name in ("1f1b", "zero_bubble")]
        assert programs[0].num_residual_slots == programs[1].num_residual_slots


def test_v_shape_keeps_embedding_and_loss_on_one_device_and_turns_on_the_last():
    schedule = make("v_shape", 4, 8, 2)
    assert [schedule.device_chunk_of(stage) for stage in (0, 3, 4, 7)] == [(0, 0), (3, 0), (3, 1), (0, 1)]
    assert schedule.program.embed_device == schedule.program.loss_device == 0
    assert schedule.program.forward_channels == schedule.program.backward_channels == ("next", "prev", "stay")
    assert make("interleaved", 4, 8, 2).program.forward_channels == ("next",)


def test_loss_is_taken_in_the_tick_in_which_the_last_stage_runs():
    schedule = make("interleaved", 4, 9, 2)
    rows = schedule.program.rows
    found = [m for valid, m in zip(rows["loss_valid"], rows["loss_microbatch"], strict=True) if valid]
    assert found == list(range(9))
    assert rows["loss_valid"].index(1) == schedule.ticks["F", 0, 7] == schedule.ticks["B", 0, 7]
    assert schedule.simulate(head=2).time == schedule.simulate().time + 18


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1c", 4, 8), r"unknown schedule '1f1c'; use '1f1b'"),
        (("Zero-Bubble", 4, 8), r"use 'zero_bubble'"),
        (("v_shape", 4, 8), r"num_chunks=1; use num_chunks=2"),
        (("zb_v", 4, 8, 3), r"num_chunks=3; use num_chunks=2, or schedule=zero_bubble"),
        (("1f1b", 0, 8), r"num_stages must be an integer of at least 1; got num_stages=0"),
        (("1f1b", 4, 0), r"num_microbatches=0; use num_microbatches=1"),
        (("gpipe", 4, 8, 1.0), r"num_chunks=1.0"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_nearest_that_can(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)
