"""Golden: Megatron's executed per-rank orders, and where ours is the same order."""

import json
from pathlib import Path

import pytest

from jaxfb.schedules import comparison, comparison_table, make, megatron_order, megatron_time
from jaxfb.schedules.megatron import schedule_table

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_schedules.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}


def ranks_of(inputs, **more):
    names = ("pipeline_size", "num_microbatches", "num_chunks", "group_size")
    return megatron_order(*(inputs[name] for name in names), forward_only=inputs["forward_only"], **more)


@pytest.mark.parametrize("name", CASES)
def test_orders_are_megatrons(name):
    inputs, expected = CASES[name]["inputs"], CASES[name]["expected"]
    if "error" in expected:
        with pytest.raises(ValueError, match="group"):
            ranks_of(inputs)
        return
    ranks = ranks_of(inputs, interleaved=expected["schedule"] == "interleaved")
    table = schedule_table(inputs["num_microbatches"], inputs["num_chunks"], inputs["group_size"])
    assert [list(item) for item in table] == expected["schedule_table"]
    assert len(ranks) == len(expected["ranks"])
    for rank, wanted in zip(ranks, expected["ranks"], strict=True):
        assert [list(action) for action in rank.order] == wanted["order"]
        assert rank.num_warmup == wanted["num_warmup"]
        if wanted["max_in_flight_chunks"] is not None:
            assert rank.max_in_flight == wanted["max_in_flight_chunks"]


@pytest.mark.parametrize("sizes", [(2, 4, 1), (4, 8, 1), (4, 8, 2), (4, 16, 4), (3, 6, 3)])
def test_a_device_of_ours_runs_megatrons_interleaved_order(sizes):
    """Sharing ticks changes when things happen, not the order on a device nor the peak."""
    num_stages, num_microbatches, num_chunks = sizes
    schedule = make("interleaved", *sizes)
    ranks = megatron_order(*sizes, interleaved=True)
    for device, rank in enumerate(ranks):
        ours = [action for row in schedule.table for action in row[device]]
        assert ours == list(rank.order)
    assert schedule.simulate().peak_live_activations == tuple(rank.max_in_flight for rank in ranks)
    assert schedule.simulate().time == pytest.approx(megatron_time(ranks, forward=1, backward=2))


def test_comparison_sets_all_kinds_and_megatron_side_by_side():
    rows = {(row.name, row.num_chunks): row for row in comparison(4, 8, 2)}
    assert rows["1f1b", 1].time == rows["Megatron 1F1B", 1].time == 33
    assert rows["interleaved", 2].time == rows["Megatron interleaved", 2].time == 28.5
    assert (rows["zero_bubble", 1].time, rows["zero_bubble", 2].time) == (30, 27)
    assert rows["v_shape", 2].peak_microbatches == rows["Megatron 1F1B", 1].peak_microbatches == 4
    assert rows["published ZB-V", 2].time == rows["published DualPipeV", 2].time == 25.5
    assert ("Megatron interleaved", 2) not in {(row.name, row.num_chunks) for row in comparison(4, 9, 2)}
    assert comparison_table(comparison(4, 8, 2)).count("\n") == 15
