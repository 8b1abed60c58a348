"""Who is lost and who is behind, told from signs of life; the clock is a list."""

from types import SimpleNamespace

import pytest

from jaxfb.process.position import Position
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.signs import Sign, Signs

NAMES = ["a", "b", "c"]


class Job:
    """Three processes as seen by the first: `pass_(seconds)` lets time go by, with new signs of `alive`."""

    def __init__(self, lost_after=10.0, stuck_after=100.0, count=3):
        self.now, self.beat = 0.0, 0
        self.positions = [Position() for _ in range(count)]
        self.signs = Signs(0, NAMES[:count], lost_after, stuck_after, lambda: self.now)
        self.heard = {}

    def pass_(self, seconds, alive=(0, 1, 2)):
        for _ in range(int(seconds)):
            self.now, self.beat = self.now + 1, self.beat + 1
            new = {k: Sign.of(self.beat, self.positions[k]) for k in alive if k < len(self.positions)}
            self.heard |= {k: Sign.read(sign.write()) for k, sign in new.items()}
            self.signs.update(self.heard)


def test_a_process_without_a_sign_is_lost_for_good():
    job = Job()
    job.pass_(9, alive=(0, 1))
    assert job.signs.who_is_lost() is None
    job.pass_(2, alive=(0, 1))
    assert job.signs.who_is_lost() == (
        "[hosts] c has given no sign of life for 10 s and counts as lost; a ends"
    )
    job.pass_(2)
    assert job.signs.who_is_lost() is not None


def test_time_in_which_this_process_was_suspended_does_not_count():
    job = Job()
    job.pass_(5)
    job.now += 1000
    job.signs.sleep(1000)
    assert job.signs.who_is_lost() is None and job.signs.who_is_stuck() is None
    job.pass_(97)
    assert job.signs.who_is_stuck() is not None


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_process_that_entered_fewest_phases_is_behind(culprit):
    job = Job()
    for index, position in enumerate(job.positions):
        position.enter("data_wait", 7)
        if index != culprit:
            position.enter("waiting", 7)
    job.pass_(102)
    said = job.signs.who_is_stuck()
    assert said.startswith(f"[hosts] nothing has moved for 100 s: {NAMES[culprit]} is behind, reading the")
    assert said.count("waiting for the devices of update 7") == 2


def test_who_waits_for_the_others_is_not_what_stops_them():
    job = Job()
    with job.positions[1].waiting(), job.positions[2].waiting():
        for _ in range(30):
            job.positions[0].tick()  # reads for long, and tells so
            job.pass_(50)
        assert job.signs.who_is_stuck() is None
        job.pass_(101)
        assert job.signs.who_is_stuck().startswith(
            "[hosts] nothing has moved for 100 s: a is behind, in start-up"
        )


def test_all_waiting_for_each_other_is_noticed():
    job = Job()
    with job.positions[0].waiting(), job.positions[1].waiting(), job.positions[2].waiting():
        job.pass_(102)
        assert job.signs.who_is_stuck().startswith(
            "[hosts] nothing has moved for 100 s: a and b and c in start"
        )


def test_one_process_watches_itself():
    job = Job(count=1)
    job.positions[0].enter("saving", 3)
    job.pass_(99)
    assert job.signs.who_is_stuck() is None
    job.positions[0].tick()
    job.pass_(100)
    assert job.signs.who_is_stuck() is None
    job.pass_(2)
    assert "100 s: a saving the state of update 3; a ends" in job.signs.who_is_stuck()
    assert Job(stuck_after=None).signs.who_is_stuck() is None


def test_what_process_0_does_alone_does_not_put_it_ahead():
    position = Position()
    with position.alone():
        position.enter("saving")
    assert (position.place, position.ticks) == (0, 1)


def test_a_process_that_takes_a_fifth_longer_is_named_within_twenty_updates():
    job = Job()
    for update in range(20):
        for index, position in enumerate(job.positions):
            position.pace(0.3 if index == 1 and update >= 3 else 0.1, 1.0)
        job.pass_(1)
        if job.signs.who_is_slow():
            break
    assert 3 <= update < 20
    assert list(job.signs.who_is_slow()) == [1] and job.signs.own_seconds()[0] == pytest.approx(0.1)
    job.positions[1]._latest.clear()
    for _ in range(10):
        job.positions[1].pace(0.1, 1.0)
    job.pass_(1)
    assert job.signs.who_is_slow() == {}


def test_nobody_is_slow_where_all_are_alike_or_little_is_known():
    job = Job()
    job.pass_(5)
    assert job.signs.who_is_slow() == {} and job.signs.own_seconds() is None
    for _ in range(10):
        for index, position in enumerate(job.positions):
            position.pace(0.5 + 0.02 * index, 1.0)
    job.pass_(1)
    assert job.signs.who_is_slow() == {} and job.signs.own_seconds() == pytest.approx([0.5, 0.52, 0.54])


def test_a_slow_process_is_reported_when_it_becomes_slow_and_not_again_while_it_is():
    looks = iter([{}, {1: "one"}, {1: "one", 2: "two"}, {1: "one"}, {}, {1: "one"}])
    hosts = SimpleNamespace(count=3, _watch=SimpleNamespace(pace=lambda: ([0.1], next(looks))), _slow=set())
    assert [Hosts.pace(hosts)[1] for _ in range(6)] == [[], ["one"], ["two"], [], [], ["one"]]
    assert Hosts.pace(SimpleNamespace(count=1)) == (None, [])
