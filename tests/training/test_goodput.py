"""Where the time of a run goes, over several starts; the clock is a number."""

import time

import pytest

from jaxfb.process.position import Position
from jaxfb.training.goodput import CAUSES, Goodput


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def trained(goodput, clock, updates, skipped=False):
    for _ in range(updates):
        clock.now += 10
        phases = {"data_wait": 1.0, "update": 6.0, "waiting": 2.0, "logging": 0.5, "callbacks": 0.0}
        goodput.add(phases, skipped)


def test_seconds_of_all_causes_add_up_to_the_time_since_the_first_start():
    clock = Clock()
    goodput = Goodput(clock.now, clock)
    clock.now += 30
    goodput.start()
    trained(goodput, clock, 3)
    trained(goodput, clock, 1, skipped=True)
    saved = goodput.save()
    assert goodput.summary() == {
        "share": pytest.approx(16 / 70, abs=1e-4),
        "seconds": {
            "updates": 16.0, "skipped": 8.0, "compile": 8.0, "start_up": 30.0,
            "data": 4.0, "callbacks": 2.0, "other": 2.0,
        },
    }  # fmt: skip
    trained(goodput, clock, 2)  # of which nothing is saved
    clock.now += 100
    again = Goodput(clock.now, clock)
    again.restore(saved)
    clock.now += 10
    again.start()
    trained(again, clock, 3)
    found = again.summary()
    assert found["seconds"]["lost"] == 120.0 and found["seconds"]["start_up"] == 40.0
    assert found["seconds"]["updates"] == 32.0 and found["share"] == pytest.approx(32 / 230, abs=1e-4)
    assert sum(found["seconds"].values()) == pytest.approx(clock.now - 1000)
    assert found["seconds"].keys() <= CAUSES.keys()
    again.end({"evaluation": 5.0, "waiting": 0.0, "saving": 0.0})
    assert again.summary()["seconds"]["evaluation"] == 5.0
    assert str(again).startswith(
        "time: 13.9% in applied updates (goodput); the rest is work done again and time away"
    )


def test_a_clock_that_was_set_back_between_two_starts_leaves_the_share_what_it_was():
    clock = Clock()
    goodput = Goodput(clock.now, clock)
    goodput.start()
    trained(goodput, clock, 5)
    saved, share = goodput.save(), goodput.share
    clock.now -= 500
    again = Goodput(clock.now, clock)
    again.restore(saved)
    assert share == pytest.approx(32 / 50) and again.share == pytest.approx(share)
    assert "lost" not in again.summary()["seconds"]


@pytest.mark.parametrize("jump", [-5000.0, 5000.0])
def test_a_clock_that_is_set_during_a_run_changes_no_duration(monkeypatch, jump):
    position, real = Position(), time.time
    before = position.now()
    assert before == pytest.approx(real(), abs=60)
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert 0 <= position.now() - before < 60
