"""Pictures and traces show what is simulated; the page in docs/ shows what the code gives."""

import ast
import json
from pathlib import Path

import pytest

import jaxfb.schedules
from jaxfb.schedules import NAMES, chrome_trace, comparison, comparison_table, make, timeline_figure
from jaxfb.schedules.costs import Costs
from jaxfb.schedules.draw import bars

COSTS = {"forward": 1, "backward_input": 1.5, "backward_weight": 0.5, "head": 0.25}


@pytest.mark.parametrize("name", NAMES)
def test_bars_add_up_to_the_simulated_time_on_each_device(name):
    schedule = make(name, 3, 5, 2)
    found = bars(schedule, Costs(**COSTS))
    for device in range(3):
        mine = [bar for bar in found if bar.device == device]
        assert all(a.start + a.length == pytest.approx(b.start) for a, b in zip(mine, mine[1:], strict=False))
        assert mine[-1].start + mine[-1].length == pytest.approx(schedule.simulate(**COSTS).time)
        busy = sum(bar.length for bar in mine if bar.microbatch is not None)
        assert busy == pytest.approx(schedule.simulate(**COSTS).ideal_time)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_timeline_is_written(tmp_path, suffix):
    path = timeline_figure(make("zero_bubble", 2, 3), tmp_path / f"timeline.{suffix}", COSTS)
    start = path.read_bytes()[:100]
    assert b"<?xml" in start if suffix == "svg" else start.startswith(b"\x89PNG")


def test_timeline_of_forwards_alone_has_no_memory_below(tmp_path):
    schedule = make("1f1b", 2, 3)
    both, forwards = (
        timeline_figure(each, tmp_path / f"{k}.svg")
        for k, each in enumerate((schedule, schedule.forward_only()))
    )
    assert "microbatches kept" in both.read_text() and "microbatches kept" not in forwards.read_text()


def test_timeline_of_an_unknown_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"timeline\.svg"):
        timeline_figure(make("1f1b", 2, 3), tmp_path / "timeline.gif")


def test_trace_has_every_action_and_returns_to_no_live_activation(tmp_path):
    schedule = make("v_shape", 2, 3, 2)
    events = json.loads(chrome_trace(schedule, tmp_path / "trace.json", COSTS).read_text())["traceEvents"]
    names = sorted(event["name"] for event in events if event["ph"] == "X" and event["name"][0] in "FB")
    assert names == sorted(str(action) for row in schedule.table for cell in row for action in cell)
    for device in range(2):
        counts = [e["args"]["chunks"] for e in events if e["ph"] == "C" and e["name"].endswith(str(device))]
        assert (max(counts), counts[-1]) == (4, 0)


def test_documented_table_is_what_the_code_gives():
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    assert comparison_table(comparison(4, 8, 2)) in page
    assert comparison_table(comparison(8, 32, 4)) in page


def test_schedules_import_no_array_library_when_imported():
    for path in Path(jaxfb.schedules.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [getattr(node, "module", None)]
            )
            assert not {str(name).split(".")[0] for name in names} & {"jax", "numpy", "matplotlib"}, path
