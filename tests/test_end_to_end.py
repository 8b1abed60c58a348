"""As a user: processes of their own, killed and started again; the README's program; every config in configs/."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from tiny import write_tiny

from jaxfb.config import Config, load_config
from jaxfb.mesh import make_mesh
from jaxfb.models.config import num_params
from jaxfb.models.lora import without_adapters
from jaxfb.models.transformer import transformer
from jaxfb.planner.job import abstract_mesh
from jaxfb.training.from_config.optimizer import optimizer
from jaxfb.training.from_config.plans import eval_plan, run_plan, train_plan
from jaxfb.training.from_config.sizes import abstract_params, model_sizes

ROOT = Path(__file__).parent.parent
CONFIGS = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if isinstance(load_config(p), Config)]

DIGESTS = """
import hashlib, json, sys
import jax, numpy as np
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import load_config
from jaxfb.training.setup import make_setup

def bits(leaf):
    key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()

def digest(run):
    setup = make_setup(load_config(run), say=lambda text: None)
    abstract = setup.train_step(setup.plan.train).abstract_state(setup.init_params)
    state, _ = CheckpointStore(run + "/checkpoints").restore(abstract)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): hashlib.sha256(bits(leaf)).hexdigest() for path, leaf in leaves}

print(json.dumps([digest(run) for run in sys.argv[1:]]))
"""


def environment(**more):
    """One device, no float64, the compile cache of the tests."""
    flags = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **flags, **more}


def jaxfb(*arguments, **more):
    command = [sys.executable, "-m", "jaxfb.cli", *map(str, arguments)]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=240)


def digests(*runs):
    """Of each run's newest checkpoint: leaf -> hash of its bits."""
    command = [sys.executable, "-c", DIGESTS, *map(str, runs)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=240)
    return json.loads(done.stdout)


def kill_after_checkpoint(path, update):
    """Starts a run and kills it, without warning, as soon as that checkpoint is there."""
    command = [sys.executable, "-m", "jaxfb.cli", "train", str(path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoint = path.parent / "run" / "checkpoints" / str(update)
    deadline = time.monotonic() + 240
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"


@pytest.mark.slow
@pytest.mark.processes
def test_forty_updates_equal_twenty_kill_and_twenty(tmp_path):
    sections = {
        "model": {"dropout": 0.1},
        "run": {"updates": 40},
        "eval": {"every": None, "prompt": ""},
        "checkpoint": {"every": 20},
        "data": {"cache_dir": str(tmp_path / "data")},
    }
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        write_tiny(tmp_path / name, **sections)
    kill_after_checkpoint(tmp_path / "killed" / "tiny.yaml", 20)
    resumed = jaxfb("train", tmp_path / "killed" / "tiny.yaml", "--resume")
    assert resumed.returncode == 0 and "after update 20 of 40" in resumed.stdout, resumed.stderr
    straight = jaxfb("train", tmp_path / "straight" / "tiny.yaml")
    assert straight.returncode == 0, straight.stderr
    one, other = digests(tmp_path / "straight" / "run", tmp_path / "killed" / "run")
    assert one == other and any("opt_state" in name for name in one)


@pytest.mark.processes
def test_a_refused_config_is_one_sentence_and_exit_code_2(tmp_path):
    refused = {
        "batch.rows=9": "9 rows per update is not a multiple of dp 1 × 2",
        "model.num_layer=3": "unknown key model.num_layer; did you mean model.num_layers?",
    }
    path = write_tiny(tmp_path)
    for override, sentence in refused.items():
        done = jaxfb("train", path, override)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_the_program_in_the_readme_runs_and_is_the_one_in_examples():
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert block == (ROOT / "examples" / "accumulate.py").read_text()
    done = subprocess.run([sys.executable, "-c", block], env=environment(), capture_output=True, text=True)
    loss, full = re.search(r"loss ([\d.]+), full batch ([\d.]+)", done.stdout).groups()
    assert loss == full and "Warning" not in done.stderr
    assert float(re.search(r"gradient differs by (\S+)", done.stdout)[1]) < 1e-12


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_with_a_flax_model_learns():
    command = [sys.executable, str(ROOT / "examples" / "own_flax_model.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert float(re.search(r"test accuracy ([\d.]+)", done.stdout)[1]) > 0.95, done.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_resolves_without_a_device_computing(path):
    """Mesh of eight devices or as many as it takes, plans, run length, optimizer, parameters by shape; the second line
    tells the size.
    """
    config = load_config(path)
    least = math.prod(size for size in vars(config.mesh).values() if size > 0)
    mesh = make_mesh(**vars(config.mesh)) if least <= 8 else abstract_mesh(config, least, None)
    plans = {"train": train_plan(config, mesh), "eval": eval_plan(config, mesh)}
    plan = run_plan(config, plans, train_rows=1_000_000)
    sizes = model_sizes(config, config.model.vocab_size or config.data.vocab_size)
    params = abstract_params(config, sizes)
    assert sum(leaf.size for leaf in jax.tree.leaves(without_adapters(params))) == num_params(sizes)
    assert transformer(sizes).param_specs(params).keys() == params.keys()
    jax.eval_shape(optimizer(config, plan).init, params)
    assert (
        path.read_text().startswith("#")
        and f"jaxfb train configs/{path.name}" in path.read_text().splitlines()[0]
    )
