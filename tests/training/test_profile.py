"""A trace that cannot be written costs the trace, not the run."""

from contextlib import ExitStack

import jax
import numpy as np
import optax
import pytest

import jaxfb
from jaxfb.training.profile import Profile

FULL = "RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device"


class Run:
    """As much of a run as a profile looks at."""

    def __init__(self, path):
        self.directory, self.said = self, []
        self.path = path
        self.say = self.said.append
        self.ending = ExitStack()

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


def loss_fn(params, microbatch, rng):
    return jaxfb.Sum((microbatch["x"] * params["w"]).sum(), 1.0 * microbatch["x"].shape[0])


@pytest.mark.parametrize("ends", ["stopped", "raised"])
def test_the_trace_of_a_run_that_ends_early_is_written(tmp_path, monkeypatch, capsys, ends):
    """There was none, and not a word of it; a later run of the same process could not be traced."""

    class End(jaxfb.Callback):
        def on_train_start(self, run):
            self._run = run

        def on_step_start(self, step):
            if step == 3 and ends == "raised":
                raise KeyboardInterrupt
            if step == 3:
                self._run.stop("for a test")

    called = []
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_, name=name: called.append(name))
    trainer = jaxfb.Trainer(
        model=loss_fn, params={"w": np.ones(4, np.float32)}, data={"x": np.ones((32, 4), np.float32)},
        optimizer=optax.sgd(0.1), dir=str(tmp_path), updates=8, rows=8, num_microbatches=1,
        callbacks=[Profile(skip=1, steps=5), End()],
    )  # fmt: skip
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert ends == "raised"
    assert called == ["start_trace", "stop_trace"]
    assert "traced updates 2 to 3 into" in capsys.readouterr().out
