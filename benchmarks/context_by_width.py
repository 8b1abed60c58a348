"""Compiles 8B for rows of mixed length on 64 v5p, without a TPU: each width on its own context devices, and on eight.

    pip install -e ".[plan]"                                 # libtpu
    python benchmarks/context_by_width.py                    # a minute or two a program

The mesh is fsdp 8 x context 8 and a microbatch has 16,384 tokens a device. A width's program is the one that runs its
rows (`ForwardBackward.part`): forward and backward of four microbatches, without the reduction and the optimizer's
update, which are a program of their own. An update has the rows of one program of each width, and one reduction.
Seconds are the roofline of the scheduled program (`jaxfb/planner/program_cost/hlo_cost.py`): it cannot be faster.
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

from jaxfb.planner import parse_topology, tpu
from jaxfb.planner.program_cost import hlo_cost

os.environ.update(tpu.ENVIRONMENT | {"JAX_PLATFORMS": "cpu"})

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from report import RESULTS, machine

from jaxfb.batch_plan import BatchPlan
from jaxfb.config import load_config
from jaxfb.forward_backward import calls, specs_of
from jaxfb.mesh import data_parallel, make_mesh, manual_axes, with_context
from jaxfb.parallel.sharding import abstract, shardings
from jaxfb.planner.job import make_job

PATH = RESULTS / "context_by_width_tpu.json"
TOPOLOGY, CONTEXT, TOKENS, MICROBATCHES = "v5p:4x4x4", 8, 16384, 4
PROGRAMS = ((131072, 8), (16384, 8), (16384, 1), (4096, 8), (4096, 1))
FINISH, FIRST = "reduction and update", PROGRAMS[0]
UPDATES = {
    "each width on as few context devices as hold it": ("131072 on 8", "16384 on 1", "4096 on 1"),
    "all widths on 8 context devices": ("131072 on 8", "16384 on 8", "4096 on 8"),
}
ONE = ("mesh.fsdp=8", f"mesh.context={CONTEXT}", "data.sequence_length=131072", "batch.rows=8")


def main() -> None:
    asked = sys.argv[1:] or [f"{width}:{context}" for width, context in PROGRAMS] + [FINISH]
    topology = parse_topology(TOPOLOGY)
    config = load_config(str(Path(__file__).parent.parent / "configs" / "8b.yaml"), ONE)
    made = make_job(config, make_mesh(**vars(config.mesh), devices=tpu.devices(topology)))
    for one in asked:
        if one == FINISH:
            name, row = FINISH, numbers(finish(made), topology)
        else:
            width, context = map(int, one.split(":"))
            name, row = f"{width} on {context}", of_width(made, topology, width, context)
        print(name, json.dumps(row), flush=True)
        save(name, row)


def of_width(made: Any, topology: Any, width: int, context: int) -> dict[str, Any]:
    """Compiles the program of one width on so many context devices."""
    fb, resolved, arguments = call_of(made, width, context)
    options = dict(fb.compiler_options)
    lowered = jax.jit(calls.add, static_argnums=(0, 1), compiler_options=options).lower(
        resolved, False, *arguments
    )
    found = numbers(lowered, topology)
    rows = jax.tree.leaves(arguments[1])[0].shape[:2]
    rows = rows[0] * rows[1]
    return {"rows": rows, **found, "tokens_per_s": round(rows * width / found["seconds"])}


def call_of(made: Any, width: int, context: int) -> tuple[Any, Any, tuple]:
    """Returns (the engine over so many context devices, what is resolved of a call, its arguments in shapes)."""
    step = made.step
    fb = replace(step.forward_backward, mesh=with_context(step.forward_backward.mesh, context))
    replicas, each = data_parallel(fb.mesh), TOKENS * context // width
    plan = BatchPlan(rows=replicas * each * MICROBATCHES, rows_per_microbatch=each, data_parallel=replicas)
    _, resolved = fb._resolve(step.model, made.state.params, plan, False, concrete=False)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((MICROBATCHES, replicas * each, width), leaf.dtype),
        made.batch.leaves,
    )
    microbatches = abstract(shapes, shardings(specs_of(shapes, fb.mesh), fb.mesh))
    weights = {"cross_entropy": jax.ShapeDtypeStruct((), jnp.float32)}
    return fb, resolved, (dict(made.state.params), microbatches, None, 1.0, weights, None)


def finish(made: Any) -> Any:
    """Lowers the reduction of every device's sums and the optimizer's update, on the mesh of the longest rows."""
    step = made.step
    fb, resolved, arguments = call_of(made, *FIRST)
    out, sums = jax.eval_shape(lambda *given: calls.add(resolved, False, *given), *arguments)
    own = NamedSharding(fb.mesh, PartitionSpec(manual_axes(fb.mesh)))
    sums = abstract(sums, jax.tree.map(lambda _: own, sums))

    def run(state, out, sums, rows):
        out = replace(out, grads=calls.reduce(resolved, sums))
        return step._finished(step._options)(state, out, rows, None)

    options = dict(fb.compiler_options)
    jitted = jax.jit(run, donate_argnums=(0, 2), compiler_options=options)
    return jitted.lower(made.state, out, sums, jax.ShapeDtypeStruct((), jnp.int32))


def numbers(lowered: Any, topology: Any) -> dict[str, Any]:
    """Compiles a program and reads what it costs."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(tpu.report_into(Path(folder)))
        needed = tpu.reported_bytes(Path(folder))
    mesh = make_mesh(fsdp=8, context=CONTEXT, devices=tpu.devices(topology))
    cost = hlo_cost.cost_of(program.as_text() or "", mesh, topology.chip, None)
    return {
        "seconds": round(cost.seconds, 4),
        "work_s": round(cost.work_seconds, 4),
        "exposed_s": round(cost.exposed_seconds, 4),
        "hbm_gb": round((needed or 0) / 1e9, 2),
        "compile_s": round(time.perf_counter() - began, 1),
    }


def updates(programs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns what an update takes of the rows of three programs, where all that it needs are there."""
    found = {}
    for name, parts in UPDATES.items():
        if not programs.keys() >= {*parts, FINISH}:
            continue
        rows = [programs[part]["rows"] for part in parts]
        tokens = sum(count * int(part.split()[0]) for count, part in zip(rows, parts, strict=True))
        seconds = sum(programs[part]["seconds"] for part in (*parts, FINISH))
        found[name] = {
            "rows": sum(rows),
            "tokens": tokens,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(tokens / seconds),
        }
    return found


def save(name: str, row: dict[str, Any]) -> None:
    """Puts one program into the results."""
    found = json.loads(PATH.read_text())["programs"] if PATH.exists() else {}
    settings = {"model": "8b", "topology": TOPOLOGY, "mesh": "fsdp 8 x context 8", "tokens_a_device": TOKENS}
    versions = machine() | {"libtpu": importlib.metadata.version("libtpu")}
    result = {"benchmark": "context_by_width", "settings": settings, "machine": versions}
    programs = found | {name: row}
    PATH.write_text(
        json.dumps(result | {"programs": programs, "updates": updates(programs)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
