"""Compiles MaxText's train step for TPUs, without a TPU, for comparison in accumulation_tpu and pipeline_tpu.

    python3.12 -m venv maxtext_env && maxtext_env/bin/pip install -r benchmarks/maxtext_requirements.txt
    maxtext_env/bin/pip install --no-deps maxtext==0.2.5 && maxtext_env/bin/pip install libtpu==0.0.48
    maxtext_env/bin/python benchmarks/maxtext_tpu.py       # ten minutes; after accumulation_tpu.py and pipeline_tpu.py

Puts MaxText's numbers into the results of those two. `train_compile` is MaxText's own; what it compiles is handed the
option that has the compiler write its report of HBM, nothing else is changed.
"""

from __future__ import annotations

import json
from pathlib import Path

from maxtext_compiled import compile_step  # isort: skip  (sets the environment that JAX reads)
from abstract import compiled_for_tpu
from accumulation_tpu import PATH as ACCUMULATION
from accumulation_tpu import ROWS
from pipeline_tpu import CONFIG, DATA, PIPE, SEQ, megabytes
from pipeline_tpu import PATH as PIPELINE

CHIPS = PIPE * DATA
MODEL = {
    "decoder_block": "llama2",
    "base_num_decoder_layers": CONFIG.num_layers,
    "base_emb_dim": CONFIG.hidden_size,
    "base_num_query_heads": CONFIG.num_heads,
    "base_num_kv_heads": CONFIG.num_kv_heads,
    "base_mlp_dim": CONFIG.mlp_size,
    "head_dim": CONFIG.head_size,
    "vocab_size": CONFIG.vocab_size,
    "max_target_length": SEQ,
    "remat_policy": "full",
    "ici_fsdp_parallelism": 1,
}
TOPOLOGY = "v5e:4x4"


def accumulated(num_microbatches: int) -> dict:
    return {
        "ici_data_parallelism": CHIPS,
        "gradient_accumulation_steps": num_microbatches,
        "per_device_batch_size": ROWS // num_microbatches,
    }


def pipelined(num_microbatches: int) -> dict:
    """One row of a replica in a microbatch."""
    return {
        "ici_pipeline_parallelism": PIPE,
        "ici_data_parallelism": DATA,
        "num_pipeline_microbatches": num_microbatches,
        "num_layers_per_pipeline_stage": CONFIG.num_layers // PIPE,
        "scan_layers": False,
        "per_device_batch_size": num_microbatches * DATA / CHIPS,
    }


def main():
    put(ACCUMULATION, {f"{count} microbatch{'es' * (count > 1)}": accumulated(count) for count in (1, 8)})
    put(PIPELINE, {str(count): pipelined(count) for count in (8, 32, 64)})


def put(path: Path, rows: dict[str, dict]) -> None:
    """MaxText's numbers of these rows into one of our results."""
    found = {name: measured(options) for name, options in rows.items()}
    result = json.loads(path.read_text())
    for number in ("temp", "argument", "hbm"):
        result[f"maxtext_{number}_mb"] = {name: row[number] for name, row in found.items()}
    path.write_text(json.dumps(result, indent=1) + "\n")


def measured(options: dict) -> dict[str, float]:
    """MB of a chip: temporaries and arguments by `memory_analysis`, HBM by the compiler's report."""
    found = {}

    def compiled(lowered):
        program, found["hbm"] = compiled_for_tpu(lowered)
        memory = program.memory_analysis()
        found["temp"], found["argument"] = map(
            megabytes, (memory.temp_size_in_bytes, memory.argument_size_in_bytes)
        )
        return program

    compile_step(MODEL | options, TOPOLOGY, compiled)
    print(options, found, flush=True)
    return found


if __name__ == "__main__":
    main()
