"""A trace that cannot be written costs the trace, not the run."""

import jax
import pytest

from jaxfb.training.profile import Profile

FULL = "RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device"


class Run:
    """As much of a run as a profile looks at."""

    def __init__(self, path):
        self.directory, self.said = self, []
        self.path = path
        self.say = self.said.append

    def sync(self):
        pass


@pytest.mark.parametrize("which", ["start_trace", "stop_trace"])
@pytest.mark.parametrize("ends", [2, 9])
def test_a_full_disk_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, which, ends):
    """It ended the run without saving, as one that does not fit into memory."""
    called = []

    def fail(*_):
        called.append(which)
        raise jax.errors.JaxRuntimeError(FULL)

    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_: None)
    monkeypatch.setattr(jax.profiler, which, fail)
    run, profile = Run(tmp_path), Profile(skip=1, steps=2)
    profile.on_train_start(run)
    for step in range(1, ends + 1):
        profile.on_step_start(step)
    profile.on_train_end(ends, {})
    (sentence,) = run.said
    assert called == [which] and sentence == (
        f"no trace is written to {tmp_path / 'trace'}, the run goes on without: {FULL}"
    )
