"""The state-space example at a tiny size: its chunks equal the recurrence, and no schedule changes its gradient."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import finish, wait_for

import jaxfb
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.metrics import read_jsonl

ROOT = Path(__file__).parent.parent
PATH = ROOT / "examples" / "state_space.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("state_space", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_chunks_equal_the_recurrence(example):
    draw, (rows, length, heads, size, state) = np.random.default_rng(0), (2, 12, 3, 4, 5)
    x = draw.normal(size=(rows, length, heads, size))
    log_decay = -draw.random((rows, length, heads))
    write, read = draw.normal(size=(2, rows, length, state))
    wanted, memory = np.zeros_like(x), np.zeros((rows, heads, size, state))
    for t in range(length):
        memory = np.exp(log_decay[:, t])[..., None, None] * memory
        memory = memory + x[:, t, ..., None] * write[:, t, None, None]
        wanted[:, t] = (memory * read[:, t, None, None]).sum(-1)
    for chunk in (1, 4, 12):
        np.testing.assert_allclose(example.scan(x, log_decay, write, read, chunk), wanted, rtol=1e-12)


@pytest.mark.slow
def test_no_schedule_changes_its_gradient(example):
    params = example.init(jax.random.key(0), width=8, heads=2, state=4)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    batch = example.windows(example.text(10_000), 4, 8, np.random.default_rng(0))
    kinds = ["1f1b", "zero_bubble", "zb_v"]  # the example itself goes through all of them, in float32
    jaxfb.check_equivalence(example.model, params, batch, [{"pipe": 2}], kinds).raise_if_above(1e-11)


def started(directory, updates):
    """The example's run as a process of its own."""
    example = PATH.with_name("train_state_space.py")
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    with (directory.parent / "log").open("a") as log:
        command = [sys.executable, str(example), str(directory), str(updates)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def results(directory, updates):
    """The loss of every update, and every bit of the parameters that the last one left."""
    store = CheckpointStore(directory / "checkpoints", keep_best=None)
    params = jax.eval_shape(lambda key: {"embed": jnp.zeros((256, 32), jnp.float32)}, jax.random.key(0))
    state, host = store.restore({"params": params}, updates, partial=True)
    records = read_jsonl(directory / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if "loss" in r}, jax.device_get(state["params"])


@pytest.mark.slow
@pytest.mark.processes
def test_the_trainer_killed_and_started_again_ends_in_the_same_bits(tmp_path):
    assert len(PATH.with_name("train_state_space.py").read_text().splitlines()) < 40
    updates, whole, parts = 10, tmp_path / "whole", tmp_path / "parts"
    assert finish([started(whole, updates)]) == [0], (tmp_path / "log").read_text()
    job = started(parts, updates)
    wait_for(parts / "checkpoints" / "4", [job])
    job.kill()
    assert finish([job]) == [-signal.SIGKILL]
    assert finish([started(parts, updates)]) == [0], (tmp_path / "log").read_text()
    (losses, params), (expected, expected_params) = results(parts, updates), results(whole, updates)
    assert losses == expected and list(losses) == list(range(1, updates + 1))
    chex.assert_trees_all_equal(params, expected_params)
