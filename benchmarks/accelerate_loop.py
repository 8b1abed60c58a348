"""Times an update beside Hugging Face Accelerate's plain loop of the same Llama: equal losses, tokens a second, memory.

    python -m venv torch_env && torch_env/bin/pip install -r benchmarks/torch_requirements.txt
    python benchmarks/accelerate_loop.py --torch-python torch_env/bin/python          # CPU, float32; some minutes
    python benchmarks/accelerate_loop.py --torch-python torch_env/bin/python --tiny   # seconds; writes nothing

Both sides start from the same weights, read the same rows in the same microbatches and divide by the targets of the
whole update; every loss of every update is compared. Each variant is a process on the same cores with the same number
of threads, and the updates of a case are interleaved, so that ratios are of one machine in one state.

Rows of unequal length: theirs pads them to the longest of a microbatch (their collator's way), compiled to the full
length (a shape that stays); ours to the full length, or packs them. Tokens a second count tokens, no padding. On an
accelerator: `jaxfb bench gpu --torch-python PATH`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from loops import AGREEMENT, BATCHES, OPTIMIZER, Job, Loop, difference, rows_of, versions
from report import interleaved, ratio, write

from jaxfb.models.config import TransformerConfig, num_params

MODEL = TransformerConfig(
    vocab_size=8192, num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=4, rope_theta=500_000.0
)
TINY = TransformerConfig(vocab_size=128, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2)
EVEN = ("jaxfb", "accelerate", "accelerate compiled")


def main() -> None:
    asked = arguments()
    jax.config.update("jax_platforms", "cpu")
    same_threads(asked.threads)
    model, length = (TINY, 32) if asked.tiny else (MODEL, 256)
    job = Job(model, num_microbatches=8, rows_per_microbatch=2, length=length)
    tied = replace(job, model=replace(model, tied_embeddings=True), num_microbatches=2)
    uneven = replace(job, uneven=True)
    cases = {
        "full rows": (job, EVEN, asked.rounds),
        "full rows, tied": (tied, EVEN[:2], 1),  # for its losses
        "rows of unequal length": (uneven, ("jaxfb", "jaxfb packed", *EVEN[1:]), asked.rounds),
    }
    table: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        table |= {f"{name}: {side}": row for side, row in compared(asked.torch_python, *case).items()}
    if asked.tiny:
        print(json.dumps(table, indent=1))
        return
    settings = {
        "model": vars(model), "parameters": num_params(model), "num_microbatches": job.num_microbatches,
        "rows_per_microbatch": job.rows_per_microbatch, "length": length, "dtype": job.dtype,
        "optimizer": OPTIMIZER, "threads": asked.threads, "rounds": asked.rounds,
    } | versions(asked.torch_python)  # fmt: skip
    write("accelerate_loop", settings, {"rows": table})


def compared(torch_python: str, job: Job, sides: tuple[str, ...], rounds: int) -> dict[str, dict[str, Any]]:
    """One row for each side, after a proof that all of them make the same updates."""
    with tempfile.TemporaryDirectory() as folder:
        job.write(Path(folder))
        loops = {side: Loop(side, torch_python, Path(folder)) for side in sides}
        for loop in loops.values():
            for _ in range(BATCHES):  # whatever compiles, compiles here
                loop()
        seconds = interleaved(loops, rounds)
        for loop in loops.values():
            loop.stop()
    apart = {side: difference(loop.losses, loops["jaxfb"].losses) for side, loop in loops.items()}
    if max(apart.values()) > AGREEMENT[job.dtype]:
        told = {side: loop.losses for side, loop in loops.items()}
        raise SystemExit(f"[accelerate_loop] not the same updates: losses {told} lie apart by {apart}")
    tokens = rows_of(job)[1].sum(1).mean()
    return {
        side: {
            "tokens_per_second": round(tokens / min(seconds[side])),
            "time_to_jaxfb": ratio(seconds, side, "jaxfb")["median_of_rounds"],
            "time_to_jaxfb_best": ratio(seconds, side, "jaxfb")["best_to_best"],
            "peak_mb": round(loop.peak_bytes / 1e6),
            "last_loss": round(loop.losses[-1], 5),
            "loss_difference": float(f"{apart[side]:.1e}"),
            "updates": len(loop.losses),
        }
        for side, loop in loops.items()
    }


def same_threads(count: int) -> None:
    """For every process from here on: XLA takes as many threads as it may use cores, torch as OpenMP is told."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    os.environ["OMP_NUM_THREADS"] = str(count)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-python", required=True, help="a python with torch_requirements.txt installed"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every process")
    parser.add_argument("--tiny", action="store_true", help="a small size; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
