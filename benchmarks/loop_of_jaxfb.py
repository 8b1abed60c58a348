"""Our side of `loops.py`: a jaxfb train step of the same job, an update for each line that is read.

    python loop_of_jaxfb.py JOB_FOLDER [packed]

The batch is handed over from the host every time, as in training. "packed" puts rows of unequal length together under
the token budget that the padded microbatches have.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np

import jaxfb
from jaxfb.config.schema import build
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import transformer


class Run:
    """A train step, its state, and the batches."""

    def __init__(self, folder: Path, packed: bool):
        job = json.loads((folder / "job.json").read_text())
        rows, size = job["num_microbatches"] * job["rows_per_microbatch"], job["rows_per_microbatch"]
        length = job["length"]
        plan = jaxfb.BatchPlan(rows=rows, rows_per_microbatch=size)
        if packed:
            plan = jaxfb.BatchPlan(
                rows=rows, max_tokens_per_microbatch=size * length, sequence_length=length, widths=(length,),
                packing=True,
            )  # fmt: skip
        max_norm = job["optimizer"].pop("max_grad_norm")
        self.step = jaxfb.make_train_step(
            transformer(build(TransformerConfig, job["model"])), adamw(**job["optimizer"]),
            jaxfb.make_mesh(devices=jax.devices()[:1]), plan, max_grad_norm=max_norm, clip_convention="torch",
            dropout=False, compute_dtype=job["dtype"], remat=job["remat"],
        )  # fmt: skip
        with np.load(folder / "weights.npz") as weights:
            self.state = self.step.init(tree_of(weights))
        arrays = np.load(folder / "batches.npz")
        self.batches = [batch_of(*each) for each in zip(arrays["tokens"], arrays["lengths"], strict=True)]

    def update(self, batch: dict) -> float:
        self.state, metrics = self.step(self.state, batch)
        return float(metrics.loss)


def adamw(*, learning_rate: float, warmup: int, total: int, **settings):
    rate = jaxfb.lr_schedule("linear", peak=learning_rate, warmup=warmup, total=total)
    return jaxfb.make_optimizer("adamw", learning_rate=rate, **settings)


def tree_of(weights) -> dict:
    """{"a.b.c": array} as nested dicts."""
    tree: dict = {}
    for name in weights:
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = weights[name]
    return tree


def batch_of(tokens: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The last token of a row predicts nothing, as where a model shifts the labels itself."""
    column = np.arange(tokens.shape[1])
    predicts = column < lengths[:, None] - 1
    targets = np.where(predicts, np.roll(tokens, -1, axis=1), 0)
    batch = {"tokens": tokens, "targets": targets, "loss_mask": predicts.astype(np.float32)}
    if (lengths == tokens.shape[1]).all():
        return batch
    return batch | {"segments": (column < lengths[:, None]).astype(np.int32)}


def peak_bytes() -> int:
    on_device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Resident memory has its peak from here on: without what compilation needed."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def main() -> None:
    run, updates = Run(Path(sys.argv[1]), "packed" in sys.argv[2:]), 0
    while sys.stdin.readline():
        began = time.perf_counter()
        try:
            loss = run.update(run.batches[updates % len(run.batches)])
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print("{}", flush=True)
            break
        seconds, updates = time.perf_counter() - began, updates + 1
        if updates <= len(run.batches):
            forget_peak()
        print(json.dumps({"loss": loss, "seconds": seconds, "peak_bytes": peak_bytes()}), flush=True)


if __name__ == "__main__":
    main()
