"""A mixture of experts through the trainer: resumed bit for bit, biases included, with the experts' load on file."""

import os
import signal

import numpy as np
import pytest
from test_trainer import assert_same_bits, losses, saved
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.callbacks import callback
from jaxfb.config import load_config
from jaxfb.metrics import read_jsonl

MODEL = {
    "num_experts": 4,
    "expert_mlp_size": 8,
    "router_bias_rate": 0.125,
    "batch_balance_coefficient": 0.01,
    "balance_coefficient": 0.0,
}
BIAS = ".params['layers']['moe']['router']['bias']"


def config(directory, **data):
    return load_config(
        write_tiny(
            directory,
            model=MODEL,
            data=data,
            run={"updates": 4},
            checkpoint={"every": None},
            mesh={"data": 2, "expert": 2},
            eval={"every": None, "prompt": ""},
        )  # fmt: skip
    )


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path):
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    whole = config(tmp_path / "whole")
    result = trainer.train(whole)
    part = config(tmp_path / "part", cache_dir=whole.data.cache_dir)
    stop = callback(before_update=lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None)
    trainer.train(part, callbacks=[stop])
    rest = trainer.train(part, resume=True)
    end = saved(whole)[0]
    assert_same_bits(saved(part)[0], end)
    assert losses(rest, "expert_load") == losses(result, "expert_load")

    records = [r for r in read_jsonl(result.directory / "metrics.jsonl") if "expert_load" in r]
    loads = np.array([record["expert_load"] for record in records])
    assert loads.shape == (4, 2, 4)
    np.testing.assert_allclose(loads.mean(-1), 1, rtol=1e-6)
    assert records[0]["expert_load/max"] == loads[0].max() and 0 < records[0][
        "router_entropy/mean"
    ] <= np.log(4)
    np.testing.assert_allclose(end[BIAS], 0.125 * np.sign(1 - loads).sum(0), atol=1e-7)
