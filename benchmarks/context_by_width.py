"""Compiles 8B for rows of mixed length on 64 v5p, without a TPU: each width on its own context devices, and on eight.

    pip install -e ".[plan]"                                 # libtpu
    python benchmarks/context_by_width.py                    # a minute or two a program

The mesh is fsdp 8 x context 8 and a microbatch has 16,384 tokens a device. A width's program is the one that runs its
rows (`ForwardBackward.part`): forward and backward of four microbatches, without the reduction and the update, of which
an update has one each. Seconds are the roofline of the scheduled program (`jaxfb/planner/hlo_cost.py`): what it cannot
be faster than.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxfb.planner import hlo_cost, parse_topology, tpu

os.environ.update(tpu.ENVIRONMENT | {"JAX_PLATFORMS": "cpu"})

import jax
import jax.numpy as jnp
from report import RESULTS, machine

from jaxfb.batch_plan import BatchPlan
from jaxfb.config import load_config
from jaxfb.forward_backward import calls, specs_of
from jaxfb.mesh import data_parallel, make_mesh, with_context
from jaxfb.parallel.sharding import abstract, shardings
from jaxfb.planner.job import make_job

PATH = RESULTS / "context_by_width_tpu.json"
TOPOLOGY, CONTEXT, TOKENS, MICROBATCHES = "v5p:4x4x4", 8, 16384, 4
PROGRAMS = ((131072, 8), (16384, 8), (16384, 1), (4096, 8), (4096, 1))
ONE = ("mesh.fsdp=8", f"mesh.context={CONTEXT}", "data.sequence_length=131072", "batch.rows=8")


def main() -> None:
    asked = [tuple(map(int, one.split(":"))) for one in sys.argv[1:]] or PROGRAMS
    topology = parse_topology(TOPOLOGY)
    config = load_config(str(Path(__file__).parent.parent / "configs" / "8b.yaml"), ONE)
    made = make_job(config, make_mesh(**vars(config.mesh), devices=tpu.devices(topology)))
    for width, context in asked:
        row = measured(made, topology, width, context)
        print(width, context, json.dumps(row), flush=True)
        save(f"{width} on {context}", row)


def measured(made: Any, topology: Any, width: int, context: int) -> dict[str, Any]:
    """Compiles the program of one width on so many context devices."""
    step = made.step
    fb = replace(step.forward_backward, mesh=with_context(step.forward_backward.mesh, context))
    replicas, each = data_parallel(fb.mesh), TOKENS * context // width
    rows = replicas * each * MICROBATCHES
    plan = BatchPlan(rows=rows, rows_per_microbatch=each, data_parallel=replicas)
    _, resolved = fb._resolve(step.model, made.state.params, plan, False, concrete=False)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((MICROBATCHES, replicas * each, width), leaf.dtype),
        made.batch.leaves,
    )
    microbatches = abstract(shapes, shardings(specs_of(shapes, fb.mesh), fb.mesh))
    weights = {"cross_entropy": jax.ShapeDtypeStruct((), jnp.float32)}
    call = (resolved, False, dict(made.state.params), microbatches, None, 1.0, weights, None)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = dict(fb.compiler_options) | tpu.report_into(Path(folder))
        program = jax.jit(calls.add, static_argnums=(0, 1), compiler_options=options).lower(*call).compile()
        needed = tpu.reported_bytes(Path(folder))
    cost = hlo_cost.cost_of(program.as_text() or "", fb.mesh, topology.chip, None)
    return {
        "rows": rows,
        "seconds": round(cost.seconds, 3),
        "work_s": round(cost.work_seconds, 3),
        "exposed_s": round(cost.exposed_seconds, 3),
        "hbm_gb": round((needed or 0) / 1e9, 2),
        "tokens_per_s": round(rows * width / cost.seconds),
        "compile_s": round(time.perf_counter() - began, 1),
    }


def save(name: str, row: dict[str, Any]) -> None:
    """Puts one program into the results."""
    found = json.loads(PATH.read_text())["programs"] if PATH.exists() else {}
    settings = {"model": "8b", "topology": TOPOLOGY, "mesh": "fsdp 8 x context 8", "tokens_a_device": TOKENS}
    versions = machine() | {"libtpu": importlib.metadata.version("libtpu")}
    result = {"benchmark": "context_by_width", "settings": settings, "machine": versions}
    PATH.write_text(json.dumps(result | {"programs": found | {name: row}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
