"""Post-training on several processes: the curve of one process, and the same bits after one of them is killed."""

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from processes import ROOT, finish, free_port, logs, start, wait_for
from quickly import flags

from jaxfb.metrics import read_jsonl
from jaxfb.training.run_dir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.processes]

COMMON = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 16, "tied_embeddings": True},
    "start": {"tokenizer": "bytes"},
    "optimizer": {"learning_rate": 0.01},
    "lr": {"name": "constant"},
    "precision": {"compute_dtype": "float64"},
    "log": {"every": 1},
    "checkpoint": {"every": 2},
    "eval": {"every": 2},
}
RL = {
    "task": {"digits": 1, "held_out": 6},
    "warm_start": {"updates": 4, "rows": 8},
    "rollout": {
        **{"prompts": 4, "samples_per_prompt": 4, "rows_per_update": 8, "rollouts": 2, "max_new_tokens": 3},
    },
    "policy": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "plans": {
        "train": {"rows_per_microbatch": 2},
        "logprob_old": {"rows_per_microbatch": 4},
        "logprob_ref": {"rows_per_microbatch": 4},
    },
}
SFT = {
    "conversations": {
        "path": "words.jsonl",
        "template": "plain",
        "sequence_length": 32,
        "held_out_fraction": 0.2,
    },
    "batch": {"rows": 8, "updates": 4},
    "plans": {"train": {"rows_per_microbatch": 2}, "eval": {"rows_per_microbatch": 2}},
}
KINDS = {"rl": RL, "sft": SFT}


def write(directory, kind, mesh, **sections):
    directory.mkdir(exist_ok=True)
    values = {**COMMON, **KINDS[kind], "mesh": mesh, "run": {"dir": str(directory / "run")}}
    if kind == "sft":
        rng = np.random.default_rng(0)
        lines = [
            f'{{"messages": [{{"role": "user", "content": "{a}"}}, {{"role": "assistant", "content": "{b}"}}]}}'
            for a, b in rng.integers(0, 99, (40, 2))
        ]
        path = directory / "words.jsonl"
        path.write_text("\n".join(lines))
        values["conversations"] = {**SFT["conversations"], "path": str(path)}
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    (directory / "tiny.yaml").write_text(yaml.safe_dump(values))


def run(directory, kind, mesh, processes, devices, *arguments, **sections):
    write(directory, kind, mesh, **sections)
    codes = finish(start(directory, processes, devices, *arguments, verb=kind))
    assert codes == [0] * processes, logs(directory, processes)
    return directory


def curve(directory):
    """(step, name) -> every number of a record that does not depend on the clock."""
    clocks = ("seconds", "per_second", "teraflops", "goodput")
    return {
        (record["step"], name): value
        for record in read_jsonl(directory / "run" / "metrics.jsonl")
        for name, value in record.items()
        if isinstance(value, int | float) and not any(word in name for word in clocks)
    }


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """kind -> the curve of an uninterrupted run on two processes with two devices each; run once."""
    return cache(lambda kind: curve(run(tmp_path_factory.mktemp("two"), kind, {"data": 2, "fsdp": 2}, 2, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_one_process(tmp_path, kind, two_processes):
    one = curve(run(tmp_path / "one", kind, {"data": 1}, 1, 1))
    two = two_processes(kind)
    assert len(one) > 20 and two == pytest.approx(one, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_ends_the_job_and_resuming_gives_the_same_bits(tmp_path, kind, two_processes):
    mesh = {"data": 2, "fsdp": 2}
    killed = tmp_path / "killed"
    write(killed, kind, mesh, hosts={"lost_after": 5})
    jobs = start(killed, 2, 2, verb=kind)
    wait_for(killed / "run" / "checkpoints" / "2", jobs)
    jobs[1].send_signal(signal.SIGKILL)
    codes = finish(jobs)
    assert codes[1] == -signal.SIGKILL and codes[0] in (0, 76), logs(killed, 2)
    assert curve(run(killed, kind, mesh, 2, 2, "--resume")) == two_processes(kind)


FAILURES = {
    "raises": r"reward raised KeyError\('key'\) ",
    "drops": r"train has \d+ problems and had 94 when the run began: ",
}


@pytest.mark.parametrize("how", FAILURES)
def test_an_error_of_a_task_ends_every_process_with_all_updates_saved(tmp_path, how):
    """Process 0 computes the rewards; the others hear of its refusal at the same point, and save with it."""
    sizes = {"rollout": {"rollouts": 4}, "warm_start": {"updates": 0}, "eval": {"every": 100}}
    write(tmp_path, "rl", {"data": 2}, **sizes, checkpoint={"every": 100})
    port, script = free_port(), str(Path(__file__).parent / "failing_task.py")
    environment = {**os.environ, "XLA_FLAGS": flags(1), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    jobs = []
    for index in range(2):
        command = [sys.executable, script, str(tmp_path), str(index), str(port), how]
        with (tmp_path / f"log{index}").open("w") as log:
            jobs.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    assert 0 not in finish(jobs)
    for log in logs(tmp_path, 2):
        assert re.search(rf"\[task\] {FAILURES[how]}.*; saved after update 4 of 8", log), log
    assert RunDirectory(tmp_path / "run").newest_update() == 4
