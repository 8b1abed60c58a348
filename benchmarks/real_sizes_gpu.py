"""Compiles models of 8B, 70B and 141B (experts) for hosts of eight H100, without a GPU: memory, work, communication.

    pip install "jaxfb[cuda]"                      # JAX's CUDA plugin contains XLA's compiler; no GPU is needed
    jaxfb bench real_sizes_gpu                     # half a minute a row and side
    jaxfb bench real_sizes_gpu --only "8B, 8 H100" --sides jaxfb

Each row is one job, compiled for the number of GPUs with the config made for H100s and with the one for any
chip: the same model, rows of an update and optimizer. `real_sizes.py` says what is read. Kernels that XLA
chooses by trying them on a device are its default ones here, and the libraries' workspaces and buffers are not counted.
MaxText is not compiled: to do that for GPUs ahead of time it takes the devices of a host that has them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import real_sizes
from real_sizes import LIKE_DEEPSEEK, Job, Rows, jaxfb_config, lower_jaxfb
from report import peak_bytes

from jaxfb.config import Config
from jaxfb.planner import gpu, parse_topology

SIDES = ("jaxfb", "any_chip")
"""With the config for H100s, and with the one that its name begins with."""
FOURTEEN = (
    "model.num_layers=48",
    "model.hidden_size=5120",
    "model.num_heads=40",
    "model.num_kv_heads=8",
    "model.mlp_size=13824",
    "model.vocab_size=152064",
    "model.rope_theta=1000000.0",
)
"""The sizes of Qwen2.5 14B."""
INPUTS_ON_HOST = ("parallel.remat=offload",)
OVERLAP = ("model.expert_overlap=true", "parallel.remat=halves")
EIGHT_STAGES = (*LIKE_DEEPSEEK, "model.num_layers=64", "mesh.expert=64", "batch.rows_per_microbatch=1")
"""Stages of eight layers; with experts over fewer hosts the program does not fit."""


def of_long_rows(length: int, context: int, rows: int) -> Job:
    """Returns a job of packed rows, one a microbatch, that a context axis cuts over 32 H100."""
    layout = (
        f"data.sequence_length={length} mesh.context={context} mesh.fsdp={32 // context} batch.rows={rows}"
    )
    return Job("8b-h100", "gpu:h100x32", (*layout.split(), "batch.rows_per_microbatch=1"))


JOBS = {
    "8B, 8 H100": Job("8b-h100", "gpu:h100x8"),
    "8B, 64 H100": Job("8b-h100", "gpu:h100x64"),
    "8B at 32k tokens, 32 H100, fsdp 8 x context 4": of_long_rows(32768, 4, 32),
    "8B at 128k tokens, 32 H100, fsdp 4 x context 8": of_long_rows(131072, 8, 16),
    "8B at 128k tokens, 32 H100, fsdp 2 x context 16": of_long_rows(131072, 16, 8),
    "14B, 8 H200": Job("8b-h100", "gpu:h200x8", FOURTEEN),
    "14B, 8 H200, layers' inputs on the host": Job("8b-h100", "gpu:h200x8", FOURTEEN + INPUTS_ON_HOST),
    "70B, 512 H100": Job("70b-h100", "gpu:h100x512"),
    "Mixtral 8x22B, 128 H100": Job("moe-141b-h100", "gpu:h100x128"),
    "Mixtral 8x22B, 128 H100, overlap": Job("moe-141b-h100", "gpu:h100x128", OVERLAP),
    "like DeepSeek-V3 with 64 layers, 512 H100": Job("moe-141b-h100", "gpu:h100x512", EIGHT_STAGES),
    "like DeepSeek-V3 with 64 layers, 512 H100, overlap": Job(
        "moe-141b-h100", "gpu:h100x512", EIGHT_STAGES + OVERLAP
    ),
}


def config_of(job: Job, side: str) -> Config:
    name = job.config if side == "jaxfb" else job.config.removesuffix("-h100")
    return jaxfb_config(replace(job, config=name))


def lower(job: Job, side: str, compiled) -> None:
    config, topology = config_of(job, side), parse_topology(job.topology)
    assert topology.chip is not None
    config = gpu.with_attention(config, "cudnn" if gpu.takes_flash(config, topology) else "xla")
    lower_jaxfb(config, gpu.devices(topology.chip, topology.num_devices), compiled)


def compile_program(lowered: Any, job: Job, side: str) -> tuple[Any, float]:
    program = lowered.compile()
    return program, peak_bytes(program)


ROWS = Rows(
    script=Path(__file__),
    jobs=JOBS,
    sides=SIDES,
    usual=SIDES,
    environment={},
    packages=("jax-cuda13-pjrt",),
    settings={"gpu": "H100", "seq": 4096, "compute_dtype": "bfloat16", "accum_dtype": "float32"},
    config=config_of,
    lower=lower,
    compile=compile_program,
)

if __name__ == "__main__":
    real_sizes.main(ROWS, __doc__ or "")
