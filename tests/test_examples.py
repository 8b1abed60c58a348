"""The examples run as they stand and reach what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "name, last",
    [
        ("own_pipelined.py", "step 100: loss 0.0"),
        ("pipelined_mlp_mixer.py", "unseen: loss 0.0"),
        ("state_space.py", "fell by 3."),
    ],
)
def test_pipelined_examples_learn(name, last):
    run = [sys.executable, str(EXAMPLES / name)]
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=900, cwd=EXAMPLES.parent, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith(last)


@pytest.mark.slow
@pytest.mark.processes
def test_a_policy_improves_on_what_it_was_taught(tmp_path):
    """The GRPO example, a shorter run of it: held-out accuracy well above that of the start."""
    config = EXAMPLES.parent / "configs" / "grpo_arithmetic.yaml"
    shorter = [f"run.dir={tmp_path / 'run'}", "rollout.rollouts=40", "eval.every=null"]
    run = [sys.executable, "-m", "jaxfb.cli", "rl", str(config), *shorter]
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "PYTHONPATH": str(EXAMPLES.parent), "XLA_FLAGS": ""}
    done = subprocess.run(run, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    accuracy = [record["eval/accuracy"] for record in map(json.loads, lines) if "eval/accuracy" in record]
    assert accuracy[-1] > accuracy[0] + 0.08
