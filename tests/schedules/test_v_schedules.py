"""ZB-V, V-Half, V-Min and DualPipeV, in which each device runs one action of its own a tick: time, memory, program."""

import pytest

from jaxfb.schedules import Schedule, make
from jaxfb.schedules.builders.v_blocks import Block, v_blocks
from jaxfb.schedules.replay import replay

KINDS = ("zb_v", "v_half", "v_min")
SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 12) for m in (1, p, 2 * p + 1, 4 * p)]


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
def test_zb_v_has_no_bubble_but_the_wait_for_the_first_microbatch(num_stages, num_microbatches):
    """6M actions of the last device, which gets its first input after P - 1 ticks: no schedule can be shorter."""
    schedule = make("zb_v", num_stages, num_microbatches, 2)
    if num_microbatches >= num_stages:
        assert schedule.num_ticks == 6 * num_microbatches + num_stages - 1
    result = schedule.simulate()
    assert result.time == pytest.approx(schedule.num_ticks / 2)
    assert max(result.peak_live_activations) <= 2 * num_stages


@pytest.mark.parametrize(
    "num_stages, num_microbatches, bubbles", [(4, 8, (0.059, 0.095, 0.187)), (8, 32, (0.036, 0.091, 0.124))]
)
def test_bubbles(num_stages, num_microbatches, bubbles):
    for name, most in zip(KINDS, bubbles, strict=True):
        assert make(name, num_stages, num_microbatches, 2).simulate().bubble_fraction <= most


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6, 8, 12, 16])
def test_memory_is_one_half_and_one_third_of_1f1b(num_stages):
    """1F1B with independent ranks keeps P microbatches on the first device, 2P of their halves."""
    for name, most in (("v_half", num_stages + 2), ("v_min", 2 * ((num_stages + 1) // 3) + 2)):
        for num_microbatches in (1, num_stages, 3 * num_stages + 1):
            result = make(name, num_stages, num_microbatches, 2).simulate()
            assert max(result.peak_live_activations) <= most


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 6, 7, 8, 9, 10, 16])
def test_times_are_those_of_the_documentation(num_stages):
    """The column "time" of docs/schedules.md, for costs of 1."""
    earlier = {
        "v_half": num_stages >= 4 and num_stages % 2 == 0,
        "v_min": num_stages >= 3 and num_stages % 3 != 1,
    }
    for name, slope in (("v_half", 3), ("v_min", 4)):
        for count in (num_stages, 3 * num_stages + 1):
            time = (6 * count + slope * num_stages - 5) / 2 - earlier[name]
            assert make(name, num_stages, count, 2).simulate().time == time, name


@pytest.mark.parametrize("name", (*KINDS, "dualpipe_v"))
def test_a_device_runs_one_action_a_tick_and_writes_nothing_in_a_bubble(name):
    schedule = make(name, 4, 9, 2)
    assert schedule.by_device and len(schedule.phases) == 1
    assert all(len(cell) <= 1 for row in schedule.table for cell in row)
    program = schedule.program
    assert program.allocated("residual") == max(schedule.simulate().peak_live_activations)
    assert sorted(replay(program, schedule.placement)) == sorted(schedule.ticks)


def test_costs_are_those_of_the_device_with_most_to_do():
    schedule = Schedule.from_table([[["F0"], []], [["F1"], ["F0"]], [[], ["F1", "B0"]], [["B0"], ["B1"]], [["B1"], []]],
                                   by_device=True)  # fmt: skip
    assert schedule.simulate(1, 2, 1).tick_times == (1, 1, 4, 3, 3)
    assert [len(schedule.phases), schedule.phases[0].kinds] == [1, "FB"]


def test_forward_only_closes_the_ticks_that_backwards_leave():
    forward = make("zb_v", 4, 8, 2).forward_only().validate()
    assert not forward.by_device and forward.num_ticks < 2 * 8 + 2 * 4
    assert forward.program.num_residual_slots == 0


def test_a_block_that_collides_or_needs_more_memory_is_passed_over():
    colliding, large, small = (
        Block((1, 1, 1, 1), (2, 2, 2)),
        Block((4, 2, 4, 2), (4, 1, 2)),
        Block((1, 1, 1, 1), (1, 1, 1)),
    )
    assert colliding.collides(4) and not large.collides(4) and not small.collides(4)
    assert v_blocks("mine", 4, 8, 2, (colliding, large, small), most=8).num_ticks == 51
    assert v_blocks("mine", 4, 8, 2, (colliding, large, small), most=5).num_ticks == 59


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
def test_dualpipe_v_is_as_short_as_zb_v_with_one_half_stage_more(num_stages, num_microbatches):
    schedule = make("dualpipe_v", num_stages, num_microbatches, 2)
    if num_microbatches >= 2 * num_stages:
        assert schedule.num_ticks == 6 * num_microbatches + num_stages - 1
    assert max(schedule.simulate().peak_live_activations) <= 2 * num_stages + 1


def test_the_order_of_dualpipe_v_is_the_published_one():
    """The eight steps of the first and the last of 4 devices (DeepSeek's DualPipeV), for 10 microbatches; W is w."""
    main = "F0 B1 w1 F1 B0 w0 "
    first = (
        6 * "F0 "
        + "F0 F1 "
        + 3 * "B1 w1 F1 "
        + 3 * main
        + 3 * "B1 w1 F1 B0 w0 "
        + "B1 w1 B0 "
        + 3 * "w0 B0 "
        + "w0"
    )
    last = 4 * "F0 F1 " + 6 * main + 2 * "B1 w1 B0 w0 " + 2 * "B1 B0 " + 2 * "w1 w0 "
    schedule = make("dualpipe_v", 4, 10, 2)
    for device, wanted in ((0, first), (3, last)):
        actions = [action for row in schedule.table for action in row[device]]
        assert [f"{a.kind}{a.chunk}".replace("W", "w") for a in actions] == wanted.split()
        for kind in "FBW":  # microbatches of a kind and chunk in their order
            for chunk in (0, 1):
                ordered = [a.microbatch for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert ordered == list(range(10))
