"""The same training job twice, ours and the plain Hugging Face Accelerate loop, each in a process of its own.

A `Job` is written to a folder: weights, rows, settings. A `Loop` is one side that reads that folder and makes one
update at a time. `on_accelerator` is what `jaxfb bench gpu --torch-python PATH` adds to its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params

OPTIMIZER = {
    "learning_rate": 1e-3, "warmup": 4, "total": 100, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8,
    "max_grad_norm": 1.0,
}  # fmt: skip
BATCHES = 2
PREALLOCATE = (
    "XLA_PYTHON_CLIENT_PREALLOCATE"  # a side has the device to itself, whatever its parent asked for
)
PACKAGES = ("torch", "transformers", "accelerate")
AGREEMENT = {"float32": 1e-4, "bfloat16": 1e-2}
"""How much two losses of one update may differ, relatively."""


@dataclass(frozen=True)
class Job:
    """What both sides are told.

    uneven: rows of log-normal length (a long tail), one of them full; else every row is full.
    dtype:  of the computation; parameters, moments and gradient sums are float32 on both sides.
    device: "cpu" or "cuda", theirs; ours takes what JAX finds.
    remat:  ours; theirs keeps everything.
    """

    model: TransformerConfig
    num_microbatches: int
    rows_per_microbatch: int
    length: int
    uneven: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    remat: str = "none"

    @property
    def rows(self) -> int:
        return self.num_microbatches * self.rows_per_microbatch

    def write(self, folder: Path) -> None:
        tokens, lengths = rows_of(self)
        np.savez(folder / "batches.npz", tokens=tokens, lengths=lengths)
        if not (folder / "weights.npz").exists():  # gigabytes, and the same for every job of one model
            np.savez(folder / "weights.npz", **weights_of(self.model))
        settings = {**asdict(self), "optimizer": OPTIMIZER}
        (folder / "job.json").write_text(json.dumps(settings))


class Loop:
    """One side of a job in a process of its own; an update a call.

    side: "jaxfb" or "accelerate", and how: "jaxfb packed", "accelerate compiled".
    """

    def __init__(self, side: str, torch_python: str, folder: Path):
        name, *how = side.split()
        python = torch_python if name == "accelerate" else sys.executable
        script = Path(__file__).with_name(f"loop_of_{name}.py")
        self._side, command = side, [python, str(script), str(folder), *how]
        environment = {key: value for key, value in os.environ.items() if key != PREALLOCATE}
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def __call__(self) -> bool:
        """One update. False: there was no memory for it, and there will be none."""
        with suppress(BrokenPipeError):  # it has ended; the answer is then empty
            self._process.stdin.write("update\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._side} ended with {self._process.wait()}; what it said is above")
        found = json.loads(line)
        if found:
            self.losses.append(found["loss"])
            self.seconds.append(found["seconds"])
            self.peak_bytes = found["peak_bytes"]
        return bool(found)

    def stop(self) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def rows_of(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[BATCHES, rows, length], 0 after the end of a row; lengths i32[BATCHES, rows]).

    Tokens are drawn by Zipf's law, so that there is something to learn and the losses fall.
    """
    random, shape = np.random.default_rng(0), (BATCHES, job.rows, job.length)
    weight = 1 / np.arange(1, job.model.vocab_size + 1)
    tokens = random.choice(job.model.vocab_size, shape, p=weight / weight.sum()).astype(np.int32)
    lengths = np.full(shape[:2], job.length, np.int32)
    if job.uneven:
        drawn = random.lognormal(np.log(job.length / 4), 0.8, shape[:2])
        lengths = np.clip(drawn, 8, job.length).astype(np.int32)
        lengths[:, 0] = job.length
    return np.where(np.arange(job.length) < lengths[..., None], tokens, 0), lengths


def weights_of(model: TransformerConfig) -> dict[str, np.ndarray]:
    """Parameters by dotted name: normal of deviation 0.02 as in transformers, scales of norms 1."""
    random, weights = np.random.default_rng(1), {}
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    for path, leaf in jax.tree.leaves_with_path(shapes):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        is_scale = name.endswith("scale")
        weights[name] = np.ones(leaf.shape, np.float32) if is_scale else normal(random, leaf.shape)
    return weights


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.float32(0.02) * random.standard_normal(shape, np.float32)


def versions(torch_python: str) -> dict[str, str]:
    """Of what the other side is made of."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PACKAGES}}}))"
    return json.loads(subprocess.run([torch_python, "-c", code], check=True, capture_output=True).stdout)


def difference(losses: list[float], to: list[float]) -> float:
    """Largest relative difference of two losses of the same update."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, to, strict=True))


def on_accelerator(
    torch_python: str, model: TransformerConfig, length: int, rows: int, sizes: tuple[int, ...], steps: int,
    *, remat: str, device: str = "cuda",
) -> dict[str, Callable[[], dict[str, Any]]]:  # fmt: skip
    """What measures each row: bfloat16 updates of `rows` rows in microbatches of each of `sizes` rows, by each side.

    Each in a process of its own that wants the whole memory: call them one after the other, before this process
    touches the accelerator or with XLA_PYTHON_CLIENT_PREALLOCATE=false. Ratios and agreement of the rows: `verdict`.
    """
    folder = tempfile.TemporaryDirectory()  # as long as one of these functions
    return {
        f"{side}, {size} rows a microbatch": partial(alone, side, torch_python, job, steps, folder)
        for size in sizes
        for job in [Job(model, rows // size, size, length, dtype="bfloat16", device=device, remat=remat)]
        for side in ("jaxfb", "accelerate", "accelerate compiled")
    }


def alone(
    side: str, torch_python: str, job: Job, steps: int, folder: tempfile.TemporaryDirectory
) -> dict[str, Any]:
    """The numbers of one side, or that it does not fit or fails. The first update compiles and is not counted."""
    job.write(Path(folder.name))
    loop = Loop(side, torch_python, Path(folder.name))
    try:
        fits = all(loop() for _ in range(1 + steps))
    except RuntimeError as error:
        return {"result": f"failed: {error}"}
    finally:
        loop.stop()
    if not fits:
        return {"result": "does not fit"}
    seconds = median(loop.seconds[1:])
    made_of = versions(torch_python) if side.startswith("accelerate") else {}
    return made_of | {
        "seconds_a_step": round(seconds, 4),
        "tokens_per_second": round(job.rows * job.length / seconds, 1),
        "first_step_seconds": round(loop.seconds[0], 1),
        "first_loss": round(loop.losses[0], 5),
        "last_loss": round(loop.losses[-1], 5),
        "peak_gb": round(loop.peak_bytes / 1e9, 2),
    }


def verdict(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The fastest size of each side, their ratio, and how far first and last losses lie apart, relatively."""
    ran = {name: row for name, row in rows.items() if "tokens_per_second" in row}
    ours, theirs = ({k: v for k, v in ran.items() if k.startswith(side)} for side in ("jaxfb", "accelerate"))
    if not ours or not theirs:
        return {"result": "one side was not measured, or does not fit at any size"}
    one, other = (max(rows.values(), key=lambda row: row["tokens_per_second"]) for rows in (ours, theirs))
    apart = max(difference(*(ends(row) for row in pair)) for pair in product(ours.values(), theirs.values()))
    return {
        "jaxfb_tokens_per_second": one["tokens_per_second"],
        "accelerate_tokens_per_second": other["tokens_per_second"],
        "ratio": round(one["tokens_per_second"] / other["tokens_per_second"], 3),
        "loss_difference": float(f"{apart:.1e}"),
    }


def ends(row: dict[str, Any]) -> list[float]:
    return [row["first_loss"], row["last_loss"]]
