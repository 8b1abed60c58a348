"""Times the guards of a run: an update computed twice, copies compared, and a checkpoint's checksums.

python benchmarks/guard_cost.py           # a minute on two cores; four simulated devices, data 2 x fsdp 2

All of it is timed in one process, the variants in turn; only ratios are reported, the median of those of neighbours, so
that other programs of the machine slow down both parts of a ratio. What checksums add to a save is the difference of
two saves, with and without them, since they are made while the arrays are written.
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

from jaxfb.checkpoint import store as checkpoint  # noqa: E402
from jaxfb.checkpoint.store import CheckpointStore  # noqa: E402
from jaxfb.config import load_config  # noqa: E402
from jaxfb.config.sections import HostsConfig  # noqa: E402
from jaxfb.guard.devices import differing_replicas  # noqa: E402
from jaxfb.trainer import make_work  # noqa: E402
from jaxfb.training.guarding.rerun import update_twice  # noqa: E402
from jaxfb.training.job.hosts import Hosts  # noqa: E402

ROUNDS, SAVES = 11, 100
SETTINGS = (
    *("model.num_layers=4", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=4"),
    *("data.tokenizer=bytes", "data.sequence_length=128", "data.max_bytes=400000", "batch.rows=16"),
    *("mesh.data=2", "mesh.fsdp=2", "optimizer.name=adamw", "optimizer.learning_rate=1e-3", "lr.final=0"),
)


def timed(call) -> tuple[float, float]:
    """Seconds of a call, and of the processors in it, the devices' work included."""
    began, worked = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - began, time.process_time() - worked


def named(state) -> dict:
    """The arrays of a train state by path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def rounds(work) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each variant, ROUNDS times in turn, after one round that compiles."""
    batch, seconds = work.read(0), {}

    def update():
        work.update(0, batch)
        return work.train_state

    variants = {
        "update": update,
        "update twice": lambda: (update_twice(work, 0, batch), work.train_state)[1],
        "compare copies": lambda: differing_replicas(named(work.train_state)) or None,
    }
    for _ in range(ROUNDS + 1):
        for name, call in variants.items():
            seconds.setdefault(name, []).append(timed(call))
    return {name: values[1:] for name, values in seconds.items()}


def saves(work, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a whole save with and without checksums, SAVES times each, now the one first, now the other."""
    store = CheckpointStore(directory, keep=1, keep_best=None, asynchronous=False)
    ways = {"save": checkpoint.checksums, "save without checksums": lambda leaves: {}}
    seconds = {name: [] for name in ways}
    for step in range(2 * SAVES + 2):
        name = list(ways)[(step + step // 2) % 2]
        checkpoint.checksums = ways[name]
        seconds[name].append(timed(lambda step=step: store.save(step, work.state(), {})))
    checkpoint.checksums = ways["save"]
    store.close()
    return {name: values[1:] for name, values in seconds.items()}


def ratios(seconds: dict[str, list[tuple[float, float]]], one: str, other: str) -> tuple[float, float]:
    """Returns how much longer one variant takes than the other, by the clock and in processor time."""
    rounds = zip(seconds[one], seconds[other], strict=True)
    by_clock, worked = zip(*((a[0] / b[0], a[1] / b[1]) for a, b in rounds), strict=True)
    return statistics.median(by_clock), statistics.median(worked)


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
            seconds = rounds(work) | saves(work, Path(directory) / "checkpoints")
            work.close()
    twice, of_processors = ratios(seconds, "update twice", "update")
    save, save_of_processors = ratios(seconds, "save", "save without checksums")
    rows = {
        "update computed twice, in updates": round(twice, 2),
        "the same, of processor time": round(of_processors, 2),
        "percent of processor time where every 100th update is verified": round(of_processors - 1, 2),
        "copies compared, in updates": round(ratios(seconds, "compare copies", "update")[0], 3),
        "time that checksums add to a save, percent": round(100 * (save - 1), 1),
        "processor time that checksums add to a save, percent": round(100 * (save_of_processors - 1), 1),
    }
    megabytes = round(size / 1e6, 1)
    settings = {"rounds": ROUNDS, "saves": SAVES, "state_megabytes": megabytes, "overrides": SETTINGS}
    numbers = {"benchmark": "guard_cost", "settings": settings, "machine": machine(), "rows": rows}
    (RESULTS / "guard_cost.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
