"""What every process refuses at once is raised after all have saved; what one refuses leaves nobody to save with."""

from types import SimpleNamespace

import pytest

from jaxfb.refusal import Refused
from jaxfb.training.job.hosts import RefusedByAll
from jaxfb.training.updates import Updates


class OfTwo(Updates):
    """The second update of a job of two processes."""

    def __init__(self):
        self.calls = []
        self._hosts = SimpleNamespace(
            count=2, first=lambda function: [self.calls.append("meets"), function()]
        )
        self._guard, self._work = SimpleNamespace(failed=0), SimpleNamespace(train_state=None)
        waits = lambda: self.calls.append("waits")  # noqa: E731
        self._run = SimpleNamespace(done=1, total=4, newest_saved=1, wait_saved=waits)

    def _arrive(self, pushed=None):
        self.calls.append("arrives")

    def _save(self):
        self.calls.append("saves")


@pytest.mark.parametrize(
    "error, calls, words",
    [
        (
            RefusedByAll("a reward"),
            ["arrives", "saves", "waits", "meets"],
            "a reward; saved after update 1 of 4",
        ),
        (Refused("a row"), ["arrives"], "a row"),
    ],
)
def test_what_all_refuse_is_saved_before(error, calls, words):
    def read():
        raise error

    updates = OfTwo()
    with pytest.raises(Refused) as refusal:
        updates._or_save_first(read)
    assert updates.calls == calls and str(refusal.value) == words
