"""Turns over earlier pieces, which no program of pieces contains."""

import pytest

from jaxfb.planner.program_cost.piece_turns import mean_turns
from jaxfb.schedules import make


@pytest.mark.parametrize("name", ["seq1f1b", "seq_abreast"])
def test_one_stage_turns_as_often_as_pieces_precede(name):
    assert mean_turns(make(name, 1, 3, 1, 4)) == pytest.approx((0 + 1 + 2 + 3) / 4)


def test_all_devices_wait_for_the_latest_piece_and_bubbles_have_none():
    """P=2, M=1, two pieces: the second one runs F in two of three ticks, and B in two of three."""
    assert mean_turns(make("gpipe", 2, 1)) == 0
    schedule = make("seq1f1b", 2, 1, 1, 2)
    with_f = sum("F" in phase.kinds for phase in schedule.phases for _ in range(phase.start, phase.stop))
    with_b = sum("B" in phase.kinds for phase in schedule.phases for _ in range(phase.start, phase.stop))
    assert (with_f, with_b) == (3, 3)
    assert mean_turns(schedule) == pytest.approx((2 * 2 + 2 * 7) / (3 * 2 + 3 * 7))
