"""Rows of a table go to updates and passes once each, the last of a pass filled up, and come back in their order."""

from types import SimpleNamespace

import numpy as np

from jaxfb.batch_plan import BatchPlan, RunPlan
from jaxfb.rl.preference import REFERENCE, PreferenceWork
from jaxfb.rl.rows import Stream
from jaxfb.types import Pipelined, Unembedding

MODEL = Pipelined(None, None, None, unembed=lambda outer, hidden: Unembedding(hidden, outer["head"]))


def table(number):
    tokens = 1 + np.arange(number * 3).reshape(number, 3)
    return {"tokens": tokens, "segments": np.ones_like(tokens)}


def test_every_pass_has_each_row_once_in_an_order_of_its_own():
    stream, run = (
        Stream(table(10), 0),
        RunPlan(BatchPlan(rows=4, num_microbatches=1), epochs=2, dataset_rows=10),
    )
    read = [stream.read(window) for window in run.windows()]
    assert [len(rows["tokens"]) for rows in read] == [4] * 6
    passes = [np.concatenate([rows["tokens"] for rows in read[k : k + 3]]) for k in (0, 3)]
    for rows in passes:
        assert sorted(rows[:10, 0].tolist()) == table(10)["tokens"][:, 0].tolist() and not rows[10:].any()
    assert passes[0].tolist() != passes[1].tolist()
    again = Stream(table(10), 0).read(run.window(4))
    assert again["tokens"].tolist() == read[4]["tokens"].tolist() and not read[5]["segments"][2:].any()


def test_log_probs_of_the_reference_are_those_of_their_own_rows():
    """The last batch is filled up; a pass never reads what an earlier one wrote."""
    plan, rows = BatchPlan("logprob_ref", rows=4, num_microbatches=1), table(6)

    def forward(model, params, batch, plan, forward_only):
        assert forward_only and REFERENCE not in batch and len(batch["tokens"]) == plan.rows
        return SimpleNamespace(outputs={"log_probs": -1.0 * batch["tokens"]})

    work = SimpleNamespace(
        plan=SimpleNamespace(by_purpose={"logprob_ref": plan}),
        base=SimpleNamespace(model=MODEL, forward=forward),
        train_state=SimpleNamespace(params=None),
    )
    before = np.zeros((6, 3))
    found = PreferenceWork._reference_of(work, rows | {REFERENCE: before})
    np.testing.assert_array_equal(found, -1.0 * rows["tokens"])
    assert not before.any()
