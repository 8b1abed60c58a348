"""Compiles every setting of the GPU benchmark for an H200 and reports its memory; needs no GPU, only jax[cuda13].

    jaxfb bench gpu_compiled          # a quarter of a minute a setting; writes results/gpu_compiled_h200_*.json

The programs are those that `jaxfb bench gpu` runs, but for what is tuned by trying it on the device. It also counts the
calls of cuDNN's flash attention: one forward and one backward, whatever is recomputed (but for remat=full).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

os.environ["JAX_PLATFORMS"] = "cpu"  # a topology is asked for by name; no CUDA device is looked for

import jax
import report
from gpu import FULL
from gpu_step import Setting, random_batch, train_step

from jaxfb.models.transformer import init_params
from jaxfb.planner import gpu
from jaxfb.planner.chips import GPUS

CHIP = GPUS["h200"]


def main() -> None:
    best = replace(FULL.best, attention="cudnn")  # "auto" asks the device at hand
    settings = {
        f"{size} rows, remat {remat}": replace(best, size=size, remat=remat)
        for size in FULL.microbatches
        for remat in ("none", "selective", "full")
    }
    settings |= {
        f"length {length}": replace(best, rows=best.tokens // length, size=1, length=length)
        for length in FULL.contexts
    }
    settings |= {
        "attention by XLA": replace(best, attention="xla"),
        "loss in chunks of 1024": replace(best, loss_chunk=1024),
        "packed documents": replace(best, segments=8),
    }
    numbers = {"memory": {name: compiled(setting) for name, setting in settings.items()}}
    about = {"model": vars(FULL.sizes), "hbm_gb": round(CHIP.memory / 1e9), "best": vars(best)}
    result = {"benchmark": "gpu_compiled", "settings": about, "machine": machine(), **numbers}
    path = report.RESULTS / f"gpu_compiled_h200_jax{jax.__version__}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")


def compiled(setting: Setting) -> dict:
    """Gigabytes of one setting, and the calls of flash attention in its program."""
    step = train_step(FULL.sizes, setting, gpu.devices(CHIP))
    batch = jax.eval_shape(lambda: random_batch(FULL.sizes, setting))
    program = step.lower(step.abstract_state(lambda key: init_params(FULL.sizes, key)), batch).compile()
    text, memory = program.as_text(), program.memory_analysis()
    row = {
        "peak_gb": round(report.peak_bytes(program) / 1e9, 2),
        "fits": report.peak_bytes(program) < CHIP.memory,
        "state_gb": round(memory.alias_size_in_bytes / 1e9, 2),
        "temp_gb": round(memory.temp_size_in_bytes / 1e9, 2),
        "flash_forward": text.count('custom_call_target="__cudnn$fmhaSoftmax"')
        + text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmax"'),
        "flash_backward": text.count('SoftmaxBackward"'),
    }
    print(setting, row, flush=True)
    return row


def machine() -> dict:
    return report.machine() | {"devices": ["H200, compiled for"], "num_devices": 1}


if __name__ == "__main__":
    main()
