"""Times a pipeline beside torch.distributed.pipelining: CPU, two stages of one thread, the same model and microbatches.

    python -m venv torch_env && torch_env/bin/pip install -r benchmarks/torch_requirements.txt
    python benchmarks/pipeline_against_torch.py --torch-python torch_env/bin/python

Ours is one process with two devices, theirs two processes over gloo, as each is meant to run on one host. All
steps are interleaved, so that the ratios are of one machine in one state. Losses of both are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
import pipeline_time as ours
from report import interleaved, ratio, write

import jaxfb

NAMES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "v_shape": "ScheduleZBVZeroBubble",
    "gpipe": "ScheduleGPipe",
}


class Torch:
    """Two ranks that run one step for every line they are given."""

    def __init__(self, python: str, path: Path, port: int):
        script = Path(__file__).with_name("torch_pipelining.py")
        common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        common["OMP_NUM_THREADS"] = "1"
        self.ranks = [
            subprocess.Popen(
                [python, str(script), str(path)],
                env={**common, "RANK": str(rank)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        self.loss = {}

    def step(self, name: str, count: int) -> float:
        """Seconds, by its own clock."""
        self.ranks[0].stdin.write(f"{name} {count}\n")
        self.ranks[0].stdin.flush()
        seconds, self.loss[name, count] = map(float, self.ranks[0].stdout.readline().split())
        return seconds

    def stop(self):
        self.ranks[0].stdin.close()
        for rank in self.ranks:
            rank.wait()


def main():
    asked = arguments()
    jax.config.update("jax_platforms", "cpu")
    mesh = jaxfb.make_mesh(pipe=ours.PIPE, devices=jax.devices()[: ours.PIPE])
    model, params = ours.transformer(ours.CONFIG), ours.init_params(ours.CONFIG, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.npz"
        np.savez(path, **exported(params, asked.microbatches))
        torch = Torch(asked.torch_python, path, asked.port)
        steps = {}
        for count in asked.microbatches:
            for name in asked.schedules:
                steps[f"jaxfb {name} {count}"] = ours.step(model, params, mesh, name, count)
                steps[f"torch {name} {count}"] = lambda name=name, count=count: torch.step(name, count)
        seconds = interleaved(steps, asked.rounds)
        torch.stop()
    rows = {}
    for count in asked.microbatches:
        loss = reference(model, params, count)
        for name in asked.schedules:
            both = [f"{which} {name} {count}" for which in ("jaxfb", "torch")]
            rows[f"{name} {count}"] = {
                "theirs": NAMES[name],
                "jaxfb_ms": round(min(seconds[both[0]]) * 1e3, 2),
                "torch_ms": round(min(seconds[both[1]]) * 1e3, 2),
                "jaxfb_over_torch": ratio(seconds, *both),
                "loss_difference": abs(torch.loss[name, count] - loss),
            }
    settings = {
        "pipe": ours.PIPE,
        "rows_per_microbatch": ours.ROWS,
        "seq": ours.SEQ,
        "model": vars(ours.CONFIG),
    }
    settings |= {"dtype": "float32", "threads_per_stage": 1, "rounds": asked.rounds, "torch": "2.13.0, gloo"}
    write("pipeline_against_torch", settings, {"rows": rows})
    print(f"{'schedule M':16}{'jaxfb ms':>10}{'torch ms':>10}{'jaxfb / torch':>15}")
    for key, row in rows.items():
        over = row["jaxfb_over_torch"]["best_to_best"]
        print(f"{key:16}{row['jaxfb_ms']:>10}{row['torch_ms']:>10}{over:>15}")


def exported(params: dict, counts) -> dict:
    layers = params["layers"]
    arrays = {
        f"layers.{name}": layers["attention"][name]["kernel"] for name in ("query", "key", "value", "output")
    }
    arrays |= {f"layers.{name}": layers["mlp"][name]["kernel"] for name in ("gate", "up", "down")}
    arrays |= {f"layers.{name}": layers[name]["scale"] for name in ("attention_norm", "mlp_norm")}
    arrays |= {"embed": params["embed"]["embedding"], "norm": params["norm"]["scale"]}
    arrays |= {"head": params["head"]["kernel"], "config": json.dumps(vars(ours.CONFIG))}
    for count in counts:
        batch = ours.microbatches(count)
        arrays |= {f"{what}_{count}": batch[what].reshape(-1, ours.SEQ) for what in ("tokens", "targets")}
    return arrays


def reference(model, params, count: int) -> float:
    """The loss of all rows at once, on one device and without a pipeline."""
    batch = {name: leaf.reshape(-1, ours.SEQ) for name, leaf in ours.microbatches(count).items()}
    plan = jaxfb.BatchPlan(rows=ours.ROWS * count, num_microbatches=1)
    return float(jaxfb.get_forward_backward_func()(model, params, batch, plan).loss)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-python", required=True, help="a python with torch_requirements.txt installed"
    )
    parser.add_argument("--schedules", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=(2, 4, 8, 16))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=29511)
    return parser.parse_args()


if __name__ == "__main__":
    main()
