"""Schedules of one's own: text in and out, validation with the bad cell marked, irregular tables."""

import copy
import re
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfb.schedules import NAMES, Action, Schedule, make
from jaxfb.schedules.action import parse_cell
from jaxfb.schedules.kinds import KINDS, Kind
from jaxfb.schedules.phases import MAX_PHASES, phases_of
from jaxfb.schedules.replay import replay

from_table, from_text = Schedule.from_table, Schedule.from_text

GOOD = """
device 0  F0.0  F1.0       .          B0.0  B1.0
device 1  .     F0.0+B0.0  F1.0+B1.0  .     .
"""


OF_OTHER_SIZES = {
    "num_microbatches=4.*got one of num_microbatches=3": lambda s, m, v: make("1f1b", s, m - 1, v),
    "num_microbatches=4.*got one of num_microbatches=5": lambda s, m, v: make("1f1b", s, m + 1, v),
    "num_stages=2,.*got one of num_stages=4": lambda s, m, v: make("1f1b", 2 * s, m, v),
    "num_chunks=3,.*got one of num_chunks=2": lambda s, m, v: make("interleaved", s, m, 2),
}


@pytest.mark.parametrize(
    ("message", "build"), OF_OTHER_SIZES.items(), ids=["fewer", "more", "stages", "chunks"]
)
def test_a_kind_that_builds_a_table_of_other_sizes_is_refused(message, build, monkeypatch):
    monkeypatch.setitem(KINDS._parts, "other", Kind(build))
    with pytest.raises(ValueError, match=f"the function of 'other' must return a schedule of {message}"):
        make("other", 2, 4, 3)


def test_a_kind_of_fixed_chunks_need_not_be_asked_for_them(monkeypatch):
    monkeypatch.setitem(KINDS._parts, "two", Kind(lambda s, m, v: make("interleaved", s, m, 2)))
    assert make("two", 2, 4).num_chunks == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 120])
def test_text_is_read_back_as_the_same_table(name, width):
    schedule = make(name, 3, 7, 2)
    assert from_text(schedule.render(width=width), name=schedule.name) == schedule
    assert from_table(schedule.table, placement=schedule.placement).table == schedule.table


def test_the_title_says_the_pieces_and_where_chunks_are():
    pieces = make("seq1f1b", 2, 3, 1, 2)
    assert from_text(pieces.render(), name=pieces.name) == pieces
    forwards = pieces.forward_only().render()
    assert (
        from_text(forwards).num_microbatches == 3 and from_text(forwards, num_pieces=3).num_microbatches == 2
    )
    own = from_table([["F0.0"], ["F0.1"]], placement=[[0, 1]])
    turned = from_table([["F0.1"], ["F0.0"]], placement=[[1, 0]])
    assert "placement [[1, 0]]" in turned.render() and "placement" not in own.render()
    assert from_text(turned.render()) == turned


def test_own_table_has_phases_slots_and_costs_like_a_built_in_one():
    schedule = from_text(GOOD, name="mine")
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (2, 2, 1)
    assert schedule.table[1] == ((Action("F", 1, 0),), (Action("F", 0, 0), Action("B", 0, 0)))
    assert [tuple(phase) for phase in schedule.phases] == [(0, 1, "F"), (1, 3, "FB"), (3, 5, "B")]
    assert schedule.simulate().time == 1 + 2 * 3 + 2 * 2
    assert max(schedule.slots.num["residual"]) == 2


@pytest.mark.parametrize(
    "text, message, marked",
    [
        (
            "device 0 F0 B0\ndevice 1 F0 B0",
            "F0.0 on device 1 in tick 0 needs F0.0 of device 0, which runs in tick 0 "
            "and takes one tick to arrive; move it to tick 1 or later",
            "device 1 F  [F0.0]!",
        ),
        ("device 0 F0 . B0\ndevice 1 . F0", "B0.0 is missing on device 1", "device 1 B"),
        ("device 0 F0 F0", "F0.0 runs twice on device 0, in ticks 0 and 1", "[F0.0]!"),
        ("device 0 F0+F1", "at most one F a tick", "[F0.0+F1.0]!"),
        ("device 0 B0 F0", "needs F0.0 of device 0, which runs in tick 1; move it to tick 1", "[B0.0]!"),
        ("device 0 F0+B0 W0 F1+B1", "W1.0 is missing on device 0", "[.]!"),
        ("device 0 B0", "F0.0 is missing on device 0", "device 0 F  [.]!"),
        ("device 0 W0 F0+B0", "needs B0.0 of device 0", "[W0.0]!"),
        (f"device 0 {' '.join(f'F{m}' for m in range(60))} F59", "in ticks 59 and 60", "[F59.0]!"),
        (f"device 0 F0 {' '.join(f'F{m}' for m in range(60))}", "in ticks 0 and 1", "[F0.0]!"),
    ],
)
def test_bad_cell_is_marked(text, message, marked):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        from_text(text)
    lines = str(refused.value).splitlines()
    assert marked in next(line for line in lines if line.endswith("<-- here"))
    assert sum(line.startswith("tick") for line in lines) == 1  # of a long table, the ticks around it alone


@pytest.mark.parametrize(
    "make_it, message",
    [
        (lambda: from_text("nothing here"), "device D ACTION"),
        (lambda: from_text("tick one\ndevice 0 F0"), "must have a number after tick and device"),
        (lambda: from_text(f"device {10**9} F0"), "must have a number after tick and device"),
        (lambda: from_text("device 0 F0 B0\ndevice 1 . X0.0"), "F3.1; got 'X0.0' on device 1 in tick 1"),
        (lambda: from_table([[(("F", 0),)]]), "got ('F', 0) on device 0 in tick 0"),
        (lambda: from_table([[((0, 0, 0),)]]), "got (0, 0, 0) on device 0 in tick 0"),
        (lambda: from_table([[()]]), "the table is empty"),
        (lambda: from_table([[[Action("X", 0, 0)]]]), "a kind is F, B or W"),
        (lambda: from_table([["F0", "F0"], ["F0"]]), "tick 1 has 1 cells for num_stages=2"),
        (
            lambda: from_table([["F0", "F0", "F0", "F0"]], placement=((0,), (2,), (1,), (3,))),
            "neighbouring devices",
        ),
        (lambda: from_table([["F0", "F0"]], placement=((0,), (0,))), "each of the stages 0 .. 1 once"),
    ],
)
def test_what_is_no_table_is_refused(make_it, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_it()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_microbatches": 3}, "F3.0 on device 0 is out of range: microbatches are 0 .. 2, chunks 0 .. 1"),
        ({"num_chunks": 1}, "F0.1 on device 0 is out of range: microbatches are 0 .. 3, chunks 0 .. 0"),
    ],
)
def test_a_table_of_more_than_its_sizes_is_refused(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(make("interleaved", 2, 4, 2), **sizes).validate()


def test_stages_are_counted_over_all_devices_and_chunks():
    schedule = make("interleaved", 2, 4, 3)
    assert [schedule.device_chunk_of(stage) for stage in (0, 1, 5)] == [(0, 0), (1, 0), (1, 2)]
    with pytest.raises(ValueError, match="stage"):
        schedule.device_chunk_of(6)
    with pytest.raises(ValueError, match="chunk"):
        schedule.stage_of(0, 3)


@pytest.mark.parametrize(
    "row", ["f_residual", "b_residual", "b_gradient", "w_cotangent", "activation_from_next"]
)
def test_replay_notices_a_wrong_slot(row):
    """The replay is what proves slots right, so it must see one that is wrong."""
    schedule = make("zero_bubble", 3, 6, 2)
    program = copy.deepcopy(schedule.program)
    tick, device = next(
        (t, d)
        for t, line in enumerate(program.rows[row])
        for d, slot in enumerate(line)
        if t > 8 and slot == 0
    )
    program.rows[row][tick][device] = 1
    with pytest.raises(ValueError, match=r"needs \('.*\) but its slot holds"):
        replay(program, schedule.placement)


@pytest.mark.parametrize("row", ["f_last", "loss_microbatch"])
def test_replay_notices_a_loss_of_what_leaves_no_stage(row):
    schedule = make("1f1b", 2, 2)
    program = copy.deepcopy(schedule.program)
    program.rows[row][1] = {"f_last": [0, 0], "loss_microbatch": 1}[row]
    with pytest.raises(ValueError, match="in a tick in which it leaves no stage"):
        replay(program, schedule.placement)


def test_irregular_table_has_few_phases_whatever_the_number_of_microbatches():
    """F and B in ticks of their own, as on ranks that take turns: the body of the merged ticks holds both."""
    for count in (4, 32):
        table = [[cell] for m in range(count) for cell in (f"F{m}", f"B{m}")]
        schedule = from_table(table)
        assert len(schedule.phases) <= MAX_PHASES
        assert schedule.phases[0].start == 0 and schedule.phases[-1].stop == 2 * count
        assert all(a.stop == b.start for a, b in zip(schedule.phases, schedule.phases[1:], strict=False))
        body = [kinds for start, stop, kinds in schedule.phases for _ in range(start, stop)]
        assert all(a.kind in kinds for kinds, row in zip(body, schedule.table, strict=True) for a in row[0])
        assert schedule.simulate().time > schedule.simulate().ideal_time


@given(st.lists(st.sampled_from(["F0", "B0", "F0+B0"]), min_size=MAX_PHASES + 1, max_size=MAX_PHASES + 5))
def test_phases_of_an_irregular_table_run_the_fewest_kinds(row):
    """Of all ways to cut its ticks into so many phases; whether it is a schedule does not matter."""
    table = [[parse_cell(cell)] for cell in row]
    kinds = [{action.kind for action in cells[0]} for cells in table]

    def executed(cuts):
        spans = zip((0, *cuts), (*cuts, len(row)), strict=True)
        return sum((stop - start) * len(set().union(*kinds[start:stop])) for start, stop in spans)

    found = phases_of(table)
    assert len(found) <= MAX_PHASES
    fewest = min(map(executed, combinations(range(1, len(row)), MAX_PHASES - 1)))
    assert sum((stop - start) * len(kinds) for start, stop, kinds in found) == fewest
