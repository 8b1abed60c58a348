"""Compiles models of 8B and 70B for TPU pods, without a TPU: memory, work, exposed communication, next to MaxText.

    python3.12 -m venv maxtext_env && maxtext_env/bin/pip install -r benchmarks/maxtext_requirements.txt
    maxtext_env/bin/pip install --no-deps maxtext==0.2.5 && maxtext_env/bin/pip install libtpu==0.0.48
    maxtext_env/bin/python benchmarks/real_sizes_tpu.py                        # two to ten minutes a row and side
    maxtext_env/bin/python benchmarks/real_sizes_tpu.py --only "8B, v6e:8x8" --sides jaxfb

Each row is one job, compiled by the same jax and libtpu for jaxfb and for MaxText: the same model, mesh, rows and
microbatches, full recomputation and flash attention, in a process each. Rows that are asked for replace earlier ones.
HBM is the compiler's report, arguments included. Seconds are `jaxfb/planner/hlo_cost.py`'s roofline of the scheduled
program: what it cannot be faster than. MFU is of that time, by the model's operations without recomputation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from report import RESULTS, machine

from jaxfb import compiler
from jaxfb.config import load_config
from jaxfb.mesh import mesh_sizes
from jaxfb.models.config import flops_per_token
from jaxfb.planner import hlo_cost, parse_topology, tpu
from jaxfb.planner.routing import Routed

ROOT = Path(__file__).parent.parent
PATH = RESULTS / "real_sizes_tpu.json"
SIDES = ("jaxfb", "jaxfb_best", "maxtext", "maxtext_best")
"""`_best`: with the options of `jaxfb/compiler.py`; the others with those that the compiler has by itself."""


@dataclass(frozen=True)
class Job:
    """config, overrides: of jaxfb. maxtext: the same in keys of its base.yml; None where it has nothing like it."""

    config: str
    topology: str
    overrides: tuple[str, ...] = ()
    maxtext: dict[str, Any] | None = field(default_factory=dict)


PIPELINE = {
    "ici_pipeline_parallelism": 8,
    "ici_fsdp_parallelism": 8,
    "ici_tensor_parallelism": 8,
    "num_pipeline_microbatches": 64,
    "num_layers_per_pipeline_stage": 10,
    "per_device_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "scan_layers": False,
}
TENSOR = {"ici_fsdp_parallelism": 64, "ici_tensor_parallelism": 8, "per_device_batch_size": 1 / 8}
IN_PIECES = (
    "model.expert_pieces=true",
    "parallel.compiler_options.xla_tpu_enable_async_ragged_all_to_all=true",
)
LIKE_DEEPSEEK = (
    "mesh.expert=16",
    "model.num_layers=60",
    "model.hidden_size=7168",
    "model.num_heads=56",
    "model.num_kv_heads=8",
    "model.num_experts=256",
    "model.experts_per_token=8",
    "model.expert_mlp_size=2048",
    "model.shared_expert_size=2048",
    "model.router_scores=sigmoid",
    "model.router_bias_rate=0.001",
    "optimizer.name=adamw",
)
"""Widths, experts and router of DeepSeek-V3, with grouped-query attention in place of latent, and no dense layers."""
JOBS = {
    "8B, v5p:4x4x4, fsdp 64": Job("8b", "v5p:4x4x4"),
    "8B, v6e:8x8, fsdp 64": Job("8b", "v6e:8x8"),
    "8B, v5e:16x16, fsdp 256": Job("8b", "v5e:16x16", maxtext={"gradient_accumulation_steps": 4}),
    "8B, v5p:4x4x4, data 8 x fsdp 8, ZeRO-1": Job(
        "8b", "v5p:4x4x4", ("mesh.data=8", "mesh.fsdp=8", "optimizer.sharding=data"), None
    ),
    "70B, v5p:8x8x8, fsdp 64 x tensor 8": Job("70b", "v5p:8x8x8", maxtext=TENSOR),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8": Job(
        "70b",
        "v5p:8x8x8",
        (
            "mesh.pp=8",
            "mesh.fsdp=8",
            "mesh.tp=8",
            "batch.rows=512",
            "schedule=1f1b",
        ),
        PIPELINE,
    ),
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8": Job("moe-141b", "v5p:4x4x8", (), None),
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8, in pieces": Job("moe-141b", "v5p:4x4x8", IN_PIECES, None),
    "like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16": Job("moe-141b", "v5p:8x8x8", LIKE_DEEPSEEK, None),
    "like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16, in pieces": Job(
        "moe-141b", "v5p:8x8x8", LIKE_DEEPSEEK + IN_PIECES, None
    ),
}


def main() -> None:
    asked = arguments()
    if asked.one:
        row = measured(asked.one, asked.sides[0], asked.keep)
        Path(asked.into).write_text(json.dumps(row))
        return
    for name in asked.only:
        for side in asked.sides:
            if side.startswith("jaxfb") or JOBS[name].maxtext is not None:
                row = (
                    read_again(name, side, asked.reread)
                    if asked.reread
                    else compile_row(name, side, asked.keep)
                )
                print(name, side, json.dumps(row), flush=True)
                save(name, side, row)


def read_again(name: str, side: str, folder: str) -> dict[str, Any]:
    """The row that is there, with what a kept program says to the reader of today."""
    text = text_path(folder, name, side).read_text()
    row = json.loads(PATH.read_text())["rows"][name][side]
    work = Routed(**row["routed"]) if "routed" in row else None
    return row | numbers(text, JOBS[name], work)


def compile_row(name: str, side: str, keep: str | None) -> dict[str, Any]:
    """The row of one side, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "row.json"
        command = [sys.executable, __file__, "--one", name, "--sides", side, "--into", str(into)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **tpu.ENVIRONMENT, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        subprocess.run([*command, *(["--keep", keep] if keep else [])], check=True, env=environment)
        return json.loads(into.read_text())


def measured(name: str, side: str, keep: str | None) -> dict[str, Any]:
    """Lowers, compiles and reads one step."""
    row: dict[str, Any] = {}

    def compiled(lowered, work=None):
        began, cpu = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            options = options_of(JOBS[name]) if side == "maxtext_best" else {}
            program = lowered.compile(options | tpu.report_into(Path(folder)))
            row["hbm_gb"] = gigabytes(tpu.reported_bytes(Path(folder)))
        row["compile_s"] = round(time.perf_counter() - began, 1)
        row["compile_cpu_s"] = round(time.process_time() - cpu, 1)
        text = program.as_text()
        row["arguments_gb"] = gigabytes(program.memory_analysis().argument_size_in_bytes)
        if work is not None:
            row["routed"] = asdict(work)
        row.update(numbers(text, JOBS[name], work))
        if keep:
            text_path(keep, name, side).write_text(text)
        return program

    if side.startswith("maxtext"):
        compile_maxtext(JOBS[name], compiled)
    else:
        compile_jaxfb(JOBS[name], compiled, side == "jaxfb_best")
    return row | {"peak_memory_gb": gigabytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def text_path(folder: str, name: str, side: str) -> Path:
    return Path(folder, re.sub(r"\W+", "_", name) + f"_{side}.hlo")


def numbers(text: str, job: Job, work: Routed | None = None) -> dict[str, Any]:
    """What a compiled program says of itself. work: of a device's experts, which no program contains."""
    topology, config = parse_topology(job.topology), jaxfb_config(job)
    cost = hlo_cost.cost_of(text, layout(job), topology.chip, work)
    tokens = config.batch.rows * config.data.sequence_length
    flops = flops_per_token(sizes(config), config.data.sequence_length) * tokens / topology.num_devices
    return {
        "step_s": round(cost.seconds, 3),
        "work_s": round(cost.work_seconds, 3),
        "products_s": round(cost.product_seconds, 3),
        "collectives_s": round(sum(one.seconds for one in cost.traffic.values()), 3),
        "exposed_s": round(cost.exposed_seconds, 3),
        "mfu": round(flops / topology.chip.flops / cost.seconds, 4),
        "moved_gb": round(cost.bytes / 1e9, 1),
        "traffic": {
            f"{axes} {kind}": {
                "count": one.count,
                "gb": gigabytes(one.bytes),
                "s": round(one.seconds, 3),
                "exposed_s": round(one.exposed_seconds, 3),
                "beside_products_gb": gigabytes(one.beside_products),
            }
            for (axes, kind), one in sorted(cost.traffic.items())
        },
    }


def layout(job: Job) -> SimpleNamespace:
    """What the reader asks of a mesh; both sides count the devices of theirs in this order."""
    shape = mesh_sizes(vars(jaxfb_config(job).mesh), parse_topology(job.topology).num_devices, "none")
    places = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    return SimpleNamespace(axis_names=tuple(shape), devices=places, size=places.size)


def jaxfb_config(job: Job):
    return load_config(str(ROOT / "configs" / f"{job.config}.yaml"), job.overrides)


def sizes(config):
    from jaxfb.planner.job import model_sizes

    return model_sizes(config)


def options_of(job: Job) -> dict[str, Any]:
    """The options by kind of chip and layout."""
    chip = parse_topology(job.topology).chip
    assert chip is not None
    return dict(compiler.table_for(chip.kind, jaxfb_config(job).mesh.tensor))


def compile_jaxfb(job: Job, compiled, best: bool) -> None:
    """The step of `jaxfb train`, which sets the options of the chip; without them if not `best`."""
    from jaxfb.mesh import make_mesh
    from jaxfb.planner.job import make_job
    from jaxfb.planner.routing import routed

    config, topology = jaxfb_config(job), parse_topology(job.topology)
    none = {} if best else dict.fromkeys(options_of(job))
    own = dict(config.parallel.compiler_options or {})
    config = replace(config, parallel=replace(config.parallel, compiler_options=own | none))
    made = make_job(config, make_mesh(**vars(config.mesh), devices=tpu.devices(topology)))
    traced = made.step.trace(made.state, made.batch)
    compiled(traced.lower(), routed(made, traced.jaxpr) if config.model.num_experts else None)


def compile_maxtext(job: Job, compiled) -> None:
    """The step of MaxText: Llama's decoder with the same sizes, a microbatch of the same rows."""
    from maxtext_compiled import compile_step

    config, devices = jaxfb_config(job), parse_topology(job.topology).num_devices
    model = sizes(config)
    keys = {
        "decoder_block": "llama2",
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.hidden_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "base_mlp_dim": model.mlp_size,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "rope_max_timescale": int(config.model.rope_theta),
        "max_target_length": config.data.sequence_length,
        "attention": "flash",
        "remat_policy": "full",
        "ici_fsdp_parallelism": devices,
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": 16,
    }
    compile_step(keys | job.maxtext, job.topology, compiled)


def save(name: str, side: str, row: dict[str, Any]) -> None:
    """Puts one row into the results, in the order of JOBS."""
    before = json.loads(PATH.read_text())["rows"] if PATH.exists() else {}
    before.setdefault(name, {})[side] = row
    rows = {name: before[name] for name in JOBS if name in before}
    versions = machine() | {"libtpu": importlib.metadata.version("libtpu")}
    settings = {"seq": 4096, "compute_dtype": "bfloat16", "accum_dtype": "float32", "remat": "full"}
    settings |= {"maxtext": version("maxtext")}
    whole = {"benchmark": "real_sizes_tpu", "settings": settings, "machine": versions, "rows": rows}
    PATH.write_text(json.dumps(whole, indent=1) + "\n")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gigabytes(size: float) -> float:
    return round(size / 1e9, 3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*JOBS], choices=[*JOBS], metavar="ROW")
    parser.add_argument("--sides", nargs="+", default=["jaxfb", "jaxfb_best", "maxtext"], choices=SIDES)
    parser.add_argument("--keep", metavar="DIR", help="the compiled programs' texts, too")
    parser.add_argument("--reread", metavar="DIR", help="compile nothing, read the texts of --keep again")
    parser.add_argument("--one", choices=[*JOBS], help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
