"""Compiles a pipelined train step for TPUs, without a TPU: memory, collectives, overlap.

    pip install "jaxfb[plan]"                                                # results: jax 0.11.2, libtpu 0.0.48
    python benchmarks/pipeline_tpu.py                                        # all of it: an hour on two cores
    python benchmarks/pipeline_tpu.py --schedules 1f1b --remat full          # adds to, or replaces in, the results

v5e 4x4, pipe 4 x data 4, a row of a replica in a microbatch; `maxtext_tpu.py` adds what MaxText takes there, which
holds embedding and head on every stage, jaxfb a share of the vocabulary. Temporaries are those of `memory_analysis`,
more than have a place in HBM at one time; the HBM that the compiler plans, arguments and all, is in its report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from dataclasses import asdict

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"

import jax
import jax.numpy as jnp
import optax
from abstract import abstract_batch, compiled_for_tpu
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from overlap import hidden_permutes
from report import RESULTS, machine

import jaxfb
from jaxfb.forward_backward import Microbatches
from jaxfb.hlo import collectives
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

PIPE, DATA, SEQ = 4, 4, 512
CONFIG = TransformerConfig(vocab_size=4096, num_layers=8, hidden_size=512, num_heads=8, mlp_size=2048)
CHUNKS = {"interleaved": 2, "v_shape": 2, "zb_v": 2, "v_half": 2, "v_min": 2}
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "v_shape", "zb_v", "v_half", "v_min", "gpipe")
REMAT = ("full", "layer", "selective", "none")
PROGRAMS = ("step", "forward_backward")
PATH = RESULTS / "pipeline_tpu_v5e.json"


def main():
    asked = arguments()
    topology = topologies.get_topology_desc("v5e:4x4", platform="tpu")
    mesh = jaxfb.make_mesh(devices=topology.devices, pipe=PIPE, data=DATA)
    before = json.loads(PATH.read_text()) if PATH.exists() else {}
    rows = before.get("rows", {})
    for remat in asked.remat:
        for schedule in asked.schedules:
            for num_microbatches in asked.microbatches:
                key = f"{schedule} {remat} {num_microbatches}"
                new = measured(mesh, schedule, remat, num_microbatches, asked.programs)
                rows[key] = rows.get(key, {}) | new
                print(key, json.dumps(rows[key]), flush=True)
                save(rows, theirs(before))
    print(table(rows))


def measured(mesh, schedule: str, remat: str, num_microbatches: int, programs: list[str]) -> dict:
    step, state, batch = abstract_step(mesh, schedule, remat, num_microbatches)
    row = {}
    if "step" in programs:
        start = time.process_time()
        compiled, hbm = compiled_for_tpu(step.lower(state, batch))
        seconds, text, memory = time.process_time() - start, compiled.as_text(), compiled.memory_analysis()
        row |= {
            "step_temp_mb": megabytes(memory.temp_size_in_bytes),
            "argument_mb": megabytes(memory.argument_size_in_bytes),
            "hbm_mb": hbm,
            "compile_cpu_s": round(seconds, 1),
            "hlo_kb": len(text) // 1000,
            "data_axis": data_axis(text, mesh),
            "permutes": hidden_permutes(text),
        }
    if "forward_backward" in programs:
        call = jax.jit(lambda params, batch: step.forward_backward(step.model, params, batch, step.plan))
        memory = call.lower(state.params, batch).compile().memory_analysis()
        row["forward_backward_temp_mb"] = megabytes(memory.temp_size_in_bytes)
        row["gradients_mb"] = megabytes(memory.output_size_in_bytes)
    return row


def abstract_step(mesh, schedule: str, remat: str, num_microbatches: int):
    """(step, abstract state, abstract batch): one row per replica and microbatch, bfloat16 compute, AdamW."""
    plan = jaxfb.BatchPlan(rows=DATA * num_microbatches, data_parallel=DATA, rows_per_microbatch=1)
    optimizer = optax.adamw(1e-3)
    step = jaxfb.make_train_step(
        transformer(CONFIG), optimizer, mesh, plan, dropout=False, schedule=schedule, remat=remat,
        num_chunks=CHUNKS.get(schedule, 1), compute_dtype=jnp.bfloat16, layer_order="pipeline",
    )  # fmt: skip
    state = step.abstract_state(lambda key: init_params(CONFIG, key))
    rows = NamedSharding(mesh, P(None, "data"))
    batch = abstract_batch(num_microbatches, DATA, SEQ, sharding=rows)
    return step, state, Microbatches(batch)


def data_axis(text: str, mesh) -> list[dict]:
    """Collectives along the data axis: one of the gradients, all in one, and small ones of records; none in a loop."""
    found = [one for one in collectives(text) if "data" in one.axes(mesh)]
    return [
        {
            "kind": one.kind,
            "arrays": one.arrays,
            "bytes": one.bytes,
            "times": one.times,
            "axes": one.axes(mesh),
        }
        for one in sorted(found, key=lambda one: -one.bytes)
    ]


def table(rows: dict) -> str:
    lines = ["temp MB per chip: whole step (forward_backward apart from its gradients)"]
    counts = sorted({int(key.split()[2]) for key in rows})
    lines.append(" ".join([f"{'schedule':12} {'remat':10}", *(f"{f'M={count}':>15}" for count in counts)]))
    for name in dict.fromkeys(key.rsplit(" ", 1)[0] for key in rows):
        cells = [cell(rows.get(f"{name} {count}")) for count in counts]
        schedule, remat = name.split()
        lines.append(" ".join([f"{schedule:12} {remat:10}", *cells]))
    return "\n".join(lines)


def cell(row: dict | None) -> str:
    if row is None:
        return f"{'':>15}"
    inner = f" ({row['forward_backward_temp_mb']})" if "forward_backward_temp_mb" in row else ""
    return f"{str(row.get('step_temp_mb', '')) + inner:>15}"


def theirs(before: dict) -> dict:
    """What `maxtext_tpu.py` has put there."""
    return {name: value for name, value in before.items() if name.startswith("maxtext")}


def save(rows: dict, beside: dict) -> None:
    settings = {"topology": "v5e:4x4", "pipe": PIPE, "data": DATA, "seq": SEQ, "rows_per_microbatch": 1}
    settings |= {
        "model": asdict(CONFIG),
        "compute_dtype": "bfloat16",
        "accum_dtype": "float32",
        "chunks": CHUNKS,
    }
    versions = machine() | {"libtpu": importlib.metadata.version("libtpu")}
    whole = {
        "benchmark": "pipeline_tpu",
        "settings": settings,
        "machine": versions,
    }
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(whole | beside | {"rows": rows}, indent=1) + "\n")


def megabytes(size: int) -> float:
    return round(size / 1e6, 2)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--remat", nargs="+", default=REMAT, choices=REMAT)
    parser.add_argument("--microbatches", nargs="+", type=int, default=(8, 32, 64))
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
