"""Pieces of sequences as items of schedules: time, memory, caches, and what a table of them must not do."""

import pytest

from jaxfb.schedules import Schedule, make
from jaxfb.schedules.command import chosen, compared, described
from jaxfb.schedules.costs import Costs
from jaxfb.schedules.draw import bars
from jaxfb.schedules.replay import replay

COSTS = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, "head": 0.0}
SIZES = [(p, m, n, v) for p in (1, 2, 4, 5) for m in (1, 3, 8) for n in (1, 2, 5, 8) for v in (1, 2, 3)]


@pytest.mark.parametrize("stages, microbatches, pieces, chunks", SIZES)
def test_only_the_ramp_of_one_piece_is_left_of_the_bubble(stages, microbatches, pieces, chunks):
    schedule = make("seq1f1b", stages, microbatches, chunks, pieces).validate()
    if chunks == 1 or microbatches * pieces >= stages:
        items = microbatches * pieces * chunks
        assert schedule.simulate().bubble_fraction == pytest.approx((stages - 1) / (items + stages - 1))
    if chunks == 1:
        most = [pieces + 2 * (stages - 1 - d) for d in range(stages)]
        found = schedule.simulate().peak_live_activations
        assert all(a <= b for a, b in zip(found, most, strict=True))
        assert microbatches * pieces < most[0] or found == tuple(most)


@pytest.mark.parametrize("name", ["seq1f1b", "seq_abreast"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_one_piece_is_1f1b(chunks, name):
    assert make(name, 4, 6, chunks).table == make("1f1b", 4, 6, chunks).table


@pytest.mark.parametrize("stages, microbatches, pieces, chunks", SIZES)
def test_microbatches_abreast_take_as_long_for_equal_pieces_and_wait_less_for_late_ones(
    stages, microbatches, pieces, chunks
):
    one, abreast = (make(name, stages, microbatches, chunks, pieces) for name in ("seq1f1b", "seq_abreast"))
    assert abreast.validate().num_ticks >= one.num_ticks  # F and B share fewer of them
    assert abreast.simulate().time == pytest.approx(one.simulate().time)
    assert abreast.simulate(attention=0.7).time <= one.simulate(attention=0.7).time + 1e-9


def test_abreast_only_the_last_pieces_are_waited_for():
    """P=8, M=4: all four are one group, whose times are those of the pieces and P - 1 times that of the last."""
    schedule, n, share = make("seq_abreast", 8, 4, 1, 16), 16, 0.71
    late = (1 - share) / n + share * 2 * n / n**2
    own = 4 * (1 - share + share * (n + 1) / n)
    assert schedule.simulate(attention=share).time == pytest.approx(3 * (own + 7 * late))
    assert max(schedule.simulate().peak_live_activations) == 4 * 16 and schedule.slots.most("cache") == 4
    large = make("seq_abreast", 8, 32, 1, 16)
    assert max(large.simulate().peak_live_activations) == 75 and large.slots.most("cache") <= 12


def test_at_few_microbatches_it_has_a_fraction_of_the_bubble_and_of_the_memory():
    """P=8, M=4: a pipeline that whole sequences leave idle most of the time."""
    whole, pieces = make("1f1b", 8, 4).simulate(), make("seq1f1b", 8, 4, 1, 16).simulate()
    assert (round(whole.bubble_fraction, 3), round(pieces.bubble_fraction, 3)) == (0.636, 0.099)
    assert (max(whole.peak_live_activations), max(pieces.peak_live_activations) / 16) == (4, 1.875)
    assert pieces.time < 0.42 * whole.time


def test_pieces_go_forward_in_order_and_come_back_against_it():
    schedule = make("seq1f1b", 3, 4, 2, 4)
    for stage in range(6):
        for kind, order in (("F", [0, 1, 2, 3]), ("B", [3, 2, 1, 0])):
            ticks = [[schedule.ticks[kind, 4 * m + p, stage] for p in order] for m in range(4)]
            assert all(row == sorted(row) for row in ticks)
    forward = schedule.forward_only()
    assert forward.num_pieces == 4 and forward.slots.most("cache") >= 1 and not forward.slots.most("residual")
    assert len(replay(forward.program, forward.placement)) == 4 * 4 * 6


@pytest.mark.parametrize(
    "device, says",
    [
        ("F1 F0 . . .  B1 B0", "F1.0 on device 0 in tick 0 needs F0.0"),
        ("F0 F1 B0 B1", "B0.0 on device 0 in tick 2 needs B1.0"),
    ],
)
def test_a_piece_before_what_it_reads_is_refused(device, says):
    with pytest.raises(ValueError, match=says):
        Schedule.from_text(f"device 0 {device}", num_pieces=2)


def test_pieces_that_do_not_make_whole_sequences_are_refused():
    with pytest.raises(ValueError, match="has 3 pieces, which num_pieces=2 does not divide"):
        Schedule.from_text("device 0 F0 F1 F2", num_pieces=2)
    with pytest.raises(ValueError, match="num_pieces must be an integer"):
        Schedule.from_text("device 0 F0 F1 F2", num_pieces=0)


def test_a_cache_in_which_another_microbatch_writes_is_found():
    program = make("seq1f1b", 1, 2, 1, 2).program
    assert program.num_cache_slots == 2
    program.rows["f_cache"] = [[0] for _ in program.rows["f_cache"]]
    program.rows["b_cache"] = [[0] for _ in program.rows["b_cache"]]
    with pytest.raises(ValueError, match="needs"):
        replay(program, ((0,),))


def test_the_command_shows_pieces():
    schedule = chosen(None, None, 4, 4, None, 2)
    assert schedule.name == "seq1f1b" and "4 microbatches in 2 pieces" in (text := described(schedule, COSTS))
    assert "(chunks of one piece, by device)" in text and "keys and values" in text
    table = compared(8, 4, 1, COSTS, 16)
    assert "seq1f1b, 16 pieces" in table and "1.875" in table
    assert "seq1f1b" not in compared(8, 4, 1, COSTS)


def test_late_pieces_cost_more_where_attention_does():
    schedule = make("seq1f1b", 1, 1, 1, 2)
    assert schedule.simulate(1, 0, 0, attention=0.5).time == pytest.approx(
        1.25
    )  # 1 of products, 3/2 of attention
    assert make("seq1f1b", 8, 4, 1, 16).simulate(attention=0.71).time == pytest.approx(17.94, abs=0.01)
    assert make("1f1b", 8, 4).simulate(attention=0.71) == make("1f1b", 8, 4).simulate()
    ends = [bar.start + bar.length for bar in bars(schedule, Costs(attention=0.5))]
    assert max(ends) == pytest.approx(schedule.simulate(attention=0.5).time)
