"""Compiles a data-parallel step with accumulation for TPUs, without a TPU: memory, reductions.

    pip install "jaxfb[plan]"                              # results: jax 0.11.2, libtpu 0.0.48
    python benchmarks/accumulation_tpu.py                  # five minutes on two cores

v5e 4x4, data 16, eight rows a replica and update, whole or in eight microbatches; `maxtext_tpu.py` adds what MaxText
takes there, which by its defaults reduces the layers' gradients over data in every microbatch.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict

import jax.numpy as jnp
import optax
from abstract import abstract_batch, compiled_for_tpu
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipeline_tpu import CONFIG, SEQ, data_axis, megabytes, theirs
from report import RESULTS, machine

import jaxfb
from jaxfb.forward_backward import Microbatches
from jaxfb.models.transformer import init_params, transformer

DATA, ROWS = 16, 8
REMAT = ("full", "selective")
PATH = RESULTS / "accumulation_tpu_v5e.json"


def main():
    topology = topologies.get_topology_desc("v5e:4x4", platform="tpu")
    mesh = jaxfb.make_mesh(devices=topology.devices, data=DATA)
    rows = {}
    for remat in REMAT:
        for num_microbatches in (1, 8):
            rows[f"{remat}, {num_microbatches} microbatches"] = row = measured(mesh, remat, num_microbatches)
            print(remat, num_microbatches, row, flush=True)
    settings = {"topology": "v5e:4x4", "data": DATA, "rows_per_replica": ROWS, "seq": SEQ}
    settings |= {"model": asdict(CONFIG), "compute_dtype": "bfloat16", "accum_dtype": "float32"}
    versions = machine() | {"libtpu": importlib.metadata.version("libtpu")}
    whole = {"benchmark": "accumulation_tpu", "settings": settings, "machine": versions}
    before = json.loads(PATH.read_text()) if PATH.exists() else {}
    PATH.write_text(json.dumps(whole | theirs(before) | {"rows": rows}, indent=1) + "\n")


def measured(mesh, remat: str, num_microbatches: int) -> dict:
    step, state, batch = abstract_step(mesh, remat, num_microbatches)
    compiled, hbm = compiled_for_tpu(step.lower(state, batch))
    memory, reductions = compiled.memory_analysis(), data_axis(compiled.as_text(), mesh)
    return {
        "temp_mb": megabytes(memory.temp_size_in_bytes),
        "argument_mb": megabytes(memory.argument_size_in_bytes),
        "hbm_mb": hbm,
        "gradient_reductions": sum(one["times"] for one in reductions if one["bytes"] > 1_000_000),
        "reduced_mb": megabytes(sum(one["times"] * one["bytes"] for one in reductions)),
    }


def abstract_step(mesh, remat: str, num_microbatches: int):
    """(step, abstract state, abstract batch): bfloat16 compute, float32 parameters and sums, AdamW."""
    size = ROWS // num_microbatches
    plan = jaxfb.BatchPlan(rows=DATA * ROWS, data_parallel=DATA, rows_per_microbatch=size)
    optimizer = optax.adamw(1e-3)
    step = jaxfb.make_train_step(
        transformer(CONFIG), optimizer, mesh, plan, dropout=False, remat=remat, compute_dtype=jnp.bfloat16
    )
    state = step.abstract_state(lambda key: init_params(CONFIG, key))
    rows = NamedSharding(mesh, P(None, "data"))
    batch = abstract_batch(num_microbatches, DATA * size, SEQ, sharding=rows)
    return step, state, Microbatches(batch)


if __name__ == "__main__":
    main()
