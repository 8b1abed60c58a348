"""Compares memory, compile time and program size of a pipeline for several numbers of microbatches, on CPU.

    python benchmarks/pipeline_memory.py                  # ten minutes on two cores

pipe=4 on four simulated devices, microbatches of a fixed size, next to GPipe by autodiff of the same model.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from abstract import abstract_batch, abstract_params
from gpipe_by_autodiff import gpipe_by_autodiff
from report import write

import jaxfb
from jaxfb.forward_backward import Microbatches
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

PIPE, ROWS, SEQ = 4, 2, 128
CONFIG = TransformerConfig(vocab_size=512, num_layers=8, hidden_size=256, num_heads=4, mlp_size=1024)
CHUNKS = {"interleaved": 2, "v_shape": 2, "zb_v": 2, "v_half": 2, "v_min": 2}
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "v_shape", "zb_v", "v_half", "v_min", "gpipe")
REMAT = ("none", "selective", "layer", "full")
AUTODIFF = "gpipe by autodiff"


def main():
    asked = arguments()
    mesh = jaxfb.make_mesh(pipe=PIPE, devices=jax.devices()[:PIPE])
    difference = same_numbers(mesh)
    rows = {}
    for remat in asked.remat:
        autodiff = (AUTODIFF,) if remat in ("none", "full") else ()
        for name in (*SCHEDULES, *autodiff):
            for num_microbatches in asked.microbatches:
                row = measured(mesh, name, remat, num_microbatches)
                rows[f"{name}, {remat}, {num_microbatches}"] = row
                print(f"{name:18} {remat:6} M={num_microbatches:<3} {row}", flush=True)
    settings = {
        "pipe": PIPE,
        "rows_per_microbatch": ROWS,
        "seq": SEQ,
        "model": asdict(CONFIG),
        "chunks": CHUNKS,
    }
    settings |= {"dtype": "float32"}
    growth = {name: grown(rows, name) for name in dict.fromkeys(key.rsplit(", ", 1)[0] for key in rows)}
    numbers = {"largest_over_smallest_over_M": growth, "gradient_difference_to_autodiff": difference}
    write("pipeline_memory", settings, numbers | {"rows": rows})
    print(table(rows, asked.microbatches))


def measured(mesh, name: str, remat: str, num_microbatches: int) -> dict:
    model, (params, batch) = transformer(CONFIG), abstract(mesh, num_microbatches)
    start = time.process_time()
    compiled = jax.jit(program(model, mesh, name, remat, num_microbatches)).lower(params, batch).compile()
    seconds, text = time.process_time() - start, compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "temp_mb": round(memory.temp_size_in_bytes / 1e6, 3),
        "compile_cpu_s": round(seconds, 2),
        "hlo_kb": len(text) // 1000,
        "hlo_instructions": sum(" = " in line for line in text.splitlines()),
    }


def program(model, mesh, name: str, remat: str, num_microbatches: int):
    """(params, batch [num_microbatches, rows, ...]) -> (loss, gradients)."""
    if name == AUTODIFF:
        return gpipe_by_autodiff(model, mesh, remat == "full")
    fb = jaxfb.get_forward_backward_func(mesh, name, num_chunks=CHUNKS.get(name, 1), remat=remat)
    plan = jaxfb.BatchPlan(rows=ROWS * num_microbatches, rows_per_microbatch=ROWS)

    def call(params, batch):
        out = fb(model, params, Microbatches(batch), plan)
        return out.loss, out.grads

    return call


def abstract(mesh, num_microbatches: int):
    params = abstract_params(jaxfb.get_forward_backward_func(mesh), CONFIG)
    return params, abstract_batch(num_microbatches, ROWS, SEQ)


def same_numbers(mesh) -> float:
    """Largest difference of a gradient between the two programs, relative to the largest gradient: one model."""
    model, params = transformer(CONFIG), init_params(CONFIG, jax.random.key(0))
    rng, shape = np.random.default_rng(0), (4, ROWS, SEQ)
    batch = {
        name: rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32) for name in ("tokens", "targets")
    }
    batch["loss_mask"] = np.ones(shape, np.float32)
    ours, theirs = (
        jax.jit(program(model, mesh, name, "none", 4))(params, batch) for name in ("1f1b", AUTODIFF)
    )
    pairs = list(zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))
    difference = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    return difference / max(float(np.abs(np.asarray(b)).max()) for _, b in pairs[1:])


def grown(rows: dict, name: str) -> dict:
    """Largest over smallest of each number over the numbers of microbatches."""
    mine = [row for key, row in rows.items() if key.rsplit(", ", 1)[0] == name]
    return {
        what: round(max(row[what] for row in mine) / min(row[what] for row in mine), 4)
        for what in ("temp_mb", "compile_cpu_s", "hlo_instructions", "hlo_kb")
    }


def table(rows: dict, counts) -> str:
    lines = [f"{'temp MB':26}" + "".join(f"{f'M={count}':>10}" for count in counts)]
    for name in dict.fromkeys(key.rsplit(", ", 1)[0] for key in rows):
        lines.append(f"{name:26}" + "".join(f"{rows[f'{name}, {count}']['temp_mb']:>10}" for count in counts))
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--remat", nargs="+", default=REMAT, choices=REMAT)
    parser.add_argument("--microbatches", nargs="+", type=int, default=(8, 32, 64))
    return parser.parse_args()


if __name__ == "__main__":
    main()
