"""What the guards of a run cost: an update computed twice, copies compared, and a checkpoint's checksums.

python benchmarks/guard_cost.py           # two minutes on two cores; four simulated devices, data 2 x fsdp 2

All of it is timed in one process, the variants in turn; only ratios are reported.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")

import jax  # noqa: E402
from report import RESULTS, machine  # noqa: E402

from jaxfb.checkpoint import CheckpointStore  # noqa: E402
from jaxfb.config import load_config  # noqa: E402
from jaxfb.config.sections import HostsConfig  # noqa: E402
from jaxfb.guard.devices import differing_replicas  # noqa: E402
from jaxfb.parallel.totals import checksums  # noqa: E402
from jaxfb.trainer import make_work  # noqa: E402
from jaxfb.training.hosts import Hosts  # noqa: E402
from jaxfb.training.rerun import update_twice  # noqa: E402

ROUNDS = 11
SETTINGS = (
    *("model.num_layers=4", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=4"),
    *("data.tokenizer=bytes", "data.sequence_length=128", "data.max_bytes=400000", "batch.rows=16"),
    *("mesh.data=2", "mesh.fsdp=2", "optimizer.name=adamw", "optimizer.learning_rate=1e-3", "lr.final=0"),
)


def timed(call) -> float:
    """Seconds of a call, the devices' work included."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def named(state) -> dict:
    """The arrays of a train state by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def rounds(work, directory: Path) -> dict[str, list[float]]:
    """Seconds of each variant, ROUNDS times in turn, after one round that compiles."""
    batch, seconds = work.read(0), {}
    store = CheckpointStore(directory, keep=1, keep_best=None, asynchronous=False)

    def update():
        work.update(0, batch)
        return work.train_state

    for index in range(ROUNDS + 1):
        variants = {
            "update": update,
            "update twice": lambda: (update_twice(work, 0, batch), work.train_state)[1],
            "compare copies": lambda: differing_replicas(named(work.train_state)) or None,
            "checksums": lambda: checksums(named(work.train_state)) and None,
            "save": lambda index=index: store.save(index, work.state(), {}),
        }
        for name, call in variants.items():
            seconds.setdefault(name, []).append(timed(call))
    store.close()
    return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    """Measures, prints and writes the ratios."""
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(
            "quickstart", [*SETTINGS, f"data.cache_dir={directory}/data", f"run.dir={directory}/run"]
        )
        with Hosts(HostsConfig()) as hosts:
            work = make_work(config, hosts)
            work.start(print)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(work.state()) if hasattr(leaf, "nbytes"))
            seconds = rounds(work, Path(directory) / "checkpoints")
            work.close()
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    twice = middle["update twice"] / middle["update"]
    rows = {
        "update computed twice, in updates": round(twice, 2),
        "percent of time where every 100th update is verified": round(twice - 1, 2),
        "copies compared, in updates": round(middle["compare copies"] / middle["update"], 3),
        "checksums, percent of a save": round(100 * middle["checksums"] / middle["save"], 2),
    }
    settings = {"rounds": ROUNDS, "state_megabytes": round(size / 1e6, 1), "overrides": SETTINGS}
    numbers = {"benchmark": "guard_cost", "settings": settings, "machine": machine(), "rows": rows}
    (RESULTS / "guard_cost.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
