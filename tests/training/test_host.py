"""The host in the loop: nothing is moved unasked, the wait for rows is on file, a trace is written on request."""

import jax
import pytest
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.config import load_config
from jaxfb.metrics import read_jsonl
from jaxfb.training.pretraining import Pretraining
from jaxfb.training.profile import Profile


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A run of six updates in which every update but the first is dispatched under a transfer guard."""
    update, seen = Pretraining.update, []

    def guarded_update(work, number, batch):
        if number == 0:
            return update(work, number, batch)
        with jax.transfer_guard("disallow"):
            seen.append(number)
            return update(work, number, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretraining, "update", guarded_update)
        config = load_config(
            write_tiny(tmp_path_factory.mktemp("host"), run={"updates": 6}, eval={"prompt": ""})
        )
        return trainer.train(config, callbacks=[Profile(skip=1, steps=2)]), seen


@pytest.mark.slow
def test_an_update_moves_nothing_that_it_was_not_told_to(guarded):
    assert guarded[1] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_wait_for_rows_is_a_metric(guarded):
    waits = [
        r["data_wait_seconds"] for r in read_jsonl(guarded[0].directory / "metrics.jsonl") if "loss" in r
    ]
    assert len(waits) == 6 and all(wait >= 0 for wait in waits) and sum(waits) > 0


@pytest.mark.slow
def test_a_profile_is_a_trace_in_the_runs_directory(guarded):
    assert list((guarded[0].directory / "trace").rglob("*.xplane.pb"))
    assert list(
        (guarded[0].directory / "trace").rglob("*.trace.json.gz")
    )  # the file that is named for Perfetto
