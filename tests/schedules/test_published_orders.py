"""Our schedules beside those that were published: the same order where it is the same, never longer elsewhere."""

import pytest

from jaxfb.schedules import make
from jaxfb.schedules.action import parse_action
from jaxfb.schedules.builders.dualpipe_v import dualpipe_v_orders
from jaxfb.schedules.builders.zb_v import zb_v_orders
from jaxfb.schedules.earliest import earliest, time_of
from jaxfb.schedules.megatron import most_in_flight
from jaxfb.schedules.placement import v_placement
from jaxfb.schedules.table import Schedule

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (p, 2 * p - 1, 2 * p, 4 * p)]

# Each device's actions, as the public code gives them for P=4 and M=8: DeepSeek's dualpipev.py, and
# ScheduleZBVZeroBubble of torch.distributed.pipelining. Kinds and chunks; microbatches of each are in their order.
DUALPIPE_V = (
    "F0 F0 F0 F0 F0 F0 F0 F1 B1 W1 F1 B1 W1 F1 B1 W1 F1 F0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 "
    "B1 W1 B0 W0 B0 W0 B0 W0 B0 W0",
    "F0 F0 F0 F0 F0 F1 F0 F1 B1 W1 F1 B1 W1 F1 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 "
    "B1 W1 B0 W0 B1 B0 W1 B0 W0 B0 W0 W0",
    "F0 F0 F0 F1 F0 F1 F0 F1 B1 W1 F1 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 B1 W1 F1 B0 W0 "
    "B1 W1 B0 W0 B1 W1 B0 B1 B0 W0 B0 W1 W0 W0",
    "F0 F1 F0 F1 F0 F1 F0 F1 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 F0 B1 W1 F1 B0 W0 "
    "B1 W1 B0 W0 B1 W1 B0 W0 B1 B0 B1 B0 W1 W0 W1 W0",
)
ZB_V = (
    "F0 F0 F0 F0 F0 F0 F0 F1 B1 W1 F1 B1 W1 F1 B1 W1 F1 B1 W1 F0 B0 W0 F1 B1 W1 B0 W0 F1 B1 W1 B0 W0 F1 B1 W1 "
    "B0 W0 F1 B1 W1 B0 W0 B0 W0 B0 W0 B0 W0",
    "F0 F0 F0 F0 F0 F1 F0 F1 B1 W1 F1 B1 W1 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 B0 W0 F1 B1 W1 "
    "B0 W0 F1 B1 W1 B0 B1 B0 W0 B0 W0 B0 W0 W1 W0",
    "F0 F0 F0 F1 F0 F1 F0 F1 B1 W1 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 B0 W0 F1 B1 W1 "
    "B0 B1 B0 B1 B0 W0 B0 W0 W1 W1 W0 W0",
    "F0 F1 F0 F1 F0 F1 F0 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 F0 B0 W0 F1 B1 W1 "
    "B0 B1 B0 B1 B0 B1 B0 W0 W1 W1 W1 W0 W0 W0",
)


def named(orders):
    return tuple(" ".join(f"{action.kind}{action.chunk}" for action in order) for order in orders)


def lockstep(orders, num_microbatches):
    """The published order in ticks that all devices share, one action a tick."""
    placement = v_placement(len(orders))
    ticks = tuple(earliest(orders, placement))
    return Schedule("published", len(orders), num_microbatches, 2, ticks, placement, by_device=True)


@pytest.mark.parametrize("orders, published", [(dualpipe_v_orders, DUALPIPE_V), (zb_v_orders, ZB_V)])
def test_the_orders_are_those_of_the_public_code(orders, published):
    found = orders(4, 8)
    assert named(found) == published
    for order in found:
        for kind, chunk in {(action.kind, action.chunk) for action in order}:
            assert [a.microbatch for a in order if (a.kind, a.chunk) == (kind, chunk)] == list(range(8))


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
def test_dualpipe_v_runs_the_published_order_cell_by_cell(num_stages, num_microbatches):
    published = lockstep(dualpipe_v_orders(num_stages, num_microbatches), num_microbatches)
    assert make("dualpipe_v", num_stages, num_microbatches, 2).table == published.table


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
def test_zb_v_is_as_short_as_published_and_shorter_where_costs_differ(num_stages, num_microbatches):
    """It mixes fewer kinds in a tick, at the price of one more cotangent between B and W."""
    ours = make("zb_v", num_stages, num_microbatches, 2)
    published = lockstep(zb_v_orders(num_stages, num_microbatches), num_microbatches)
    assert ours.num_ticks <= published.num_ticks
    assert (ours.num_ticks == published.num_ticks) or num_microbatches < 2 * num_stages - 1
    assert max(ours.simulate().peak_live_activations) == max(published.simulate().peak_live_activations)
    uneven = {"forward": 1, "backward_input": 1.2, "backward_weight": 0.9}
    assert ours.simulate(**uneven).time <= published.simulate(**uneven).time * (1 + 1e-12)
    if num_microbatches >= 2 * num_stages - 1:
        assert ours.program.num_cotangent_slots <= published.program.num_cotangent_slots + 1
        last = [[a for row in s.table for a in row[-1] if a.kind != "W"] for s in (ours, published)]
        assert last[0] == last[1]


@pytest.mark.parametrize("num_stages, num_microbatches", SIZES)
def test_ticks_cost_nothing_where_costs_are_equal(num_stages, num_microbatches):
    for orders in (zb_v_orders, dualpipe_v_orders):
        found = orders(num_stages, num_microbatches)
        at_own_pace = time_of(found, v_placement(num_stages), dict.fromkeys("FBW", 1))
        assert lockstep(found, num_microbatches).num_ticks == at_own_pace


# (P, M): ticks and largest peak of V-Half and of V-Min by the authors' code (zbv_greedy.py of
# sail-sg/zero-bubble-pipeline-parallelism, all costs 1, free transport)
PUBLISHED = {
    (2, 4): ((25, 4), (27, 4)),
    (3, 6): ((41, 4), (41, 4)),
    (4, 8): ((53, 6), (59, 4)),
    (4, 16): ((101, 6), (107, 4)),
    (5, 10): ((71, 6), (75, 6)),
    (6, 12): ((83, 8), (89, 6)),
    (8, 16): ((113, 10), (123, 8)),
    (8, 32): ((209, 10), (219, 8)),
}


@pytest.mark.parametrize("sizes", PUBLISHED)
def test_v_half_and_v_min_are_no_longer_than_published(sizes):
    """With the same peak; where P is odd V-Half has one half-stage more, and is shorter."""
    for name, (ticks, peak) in zip(("v_half", "v_min"), PUBLISHED[sizes], strict=True):
        schedule = make(name, *sizes, 2)
        more, longer = max(schedule.simulate().peak_live_activations) - peak, schedule.num_ticks - ticks
        assert (more, longer) == (1, -1) if name == "v_half" and sizes[0] % 2 else more == 0 >= longer


def test_what_a_forward_leaves_is_there_until_its_weight_gradients():
    order = [parse_action(text) for text in ("F0", "B0", "F1", "B1", "W0", "F2", "W1", "B2", "W2")]
    assert most_in_flight(order) == 2
    assert most_in_flight([action for action in order if action.kind != "W"]) == 1
