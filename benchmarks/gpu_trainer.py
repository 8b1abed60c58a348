"""`jaxfb train` on the benchmark's model, data loader, logging and a checkpoint included. Beside `gpu.py`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

import numpy as np
from gpu_step import Setting

from jaxfb import trainer
from jaxfb.callbacks import callback
from jaxfb.config import config_from_dict
from jaxfb.models.config import TransformerConfig, flops_per_token


def trained(sizes: TransformerConfig, setting: Setting, updates: int, rate: float, directory: str) -> dict:
    """One run of so many updates with a checkpoint after each quarter; the first two updates are not counted.

    tokens_per_second: from the arrival of the second update's numbers to that of the last, with three checkpoints.
    slowest_to_median: of the times between arrivals; a checkpoint begins behind some of them.
    data_wait_seconds: that an update waited for its rows, mean.
    seconds_saving: of each checkpoint, how long the updates waited; for the first one programs are compiled.
    """
    write_tokens(sizes, setting, updates, Path(directory))
    arrivals, waits, saves = [], [], []

    def arrived(step, metrics):
        arrivals.append(time.perf_counter())
        waits.append(metrics["data_wait_seconds"])
        saves.append(metrics["saving_seconds"])

    config = config_from_dict(config_of(sizes, setting, updates, Path(directory)))
    with contextlib.redirect_stdout(sys.stderr):
        result = trainer.train(config, callbacks=[callback(on_step_end=arrived)])
    between = np.diff(arrivals[1:])
    tokens = setting.tokens * len(between) / (arrivals[-1] - arrivals[1])
    return {
        "rows": setting.rows,
        "size": setting.size,
        "remat": setting.remat,
        "updates": result.updates,
        "tokens_per_second": round(tokens, 1),
        "mfu_of_measured_rate": round(tokens * flops_per_token(sizes, setting.length) / rate, 4),
        "median_seconds_a_step": round(median(between), 4),
        "slowest_to_median": round(float(max(between)) / median(between), 3),
        "data_wait_seconds": round(mean(waits[2:]), 5),
        "seconds_saving": [round(seconds, 2) for seconds in saves if seconds > 0],
    }


def write_tokens(sizes: TransformerConfig, setting: Setting, updates: int, directory: Path) -> None:
    """Random tokens for so many updates; a document every row or so."""
    count = updates * setting.tokens + 1
    tokens = np.random.default_rng(0).integers(1, sizes.vocab_size, count, np.uint32)
    tokens[:: setting.length] = 0
    np.save(directory / "tokens.npy", tokens)
    sidecar = {"vocab_size": sizes.vocab_size, "eos_id": 0}
    (directory / "tokens.json").write_text(json.dumps(sidecar))


def config_of(sizes: TransformerConfig, setting: Setting, updates: int, directory: Path) -> dict:
    return {
        "model": {
            **asdict(sizes),
            "attention": setting.attention,
            "loss_chunk": setting.loss_chunk,
        },
        "data": {
            "source": "tokens",
            "path": str(directory / "tokens.npy"),
            "sequence_length": setting.length,
            "packing": "concat" if setting.segments else "stream",
            "held_out_fraction": 0.0,
            "cache_dir": str(directory / "data"),
        },
        "batch": {"rows": setting.rows, "rows_per_microbatch": setting.size},
        "run": {"updates": updates, "dir": str(directory / "run")},
        "optimizer": {"learning_rate": 1e-4, "weight_decay": 0.1, "max_grad_norm": 1.0},
        "lr": {"name": "constant"},
        "mesh": {"data": 1},
        "parallel": {"remat": setting.remat},
        "precision": {"compute_dtype": "bfloat16"},
        "checkpoint": {"every": updates // 4, "keep": 1, "keep_best": None},
    }
