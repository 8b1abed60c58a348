"""Compiles whole train steps of real size, a row in a process of its own, and reads what the program takes.

Shared by `real_sizes_tpu.py` and `real_sizes_gpu.py`. Rows that are asked for replace earlier ones in the results.
HBM is the compiler's report, arguments included. Seconds are the roofline of the scheduled program
(`jaxfb/planner/program_cost/hlo_cost.py`): what it cannot be faster than, and the planner's time for an optimizer state
in the host's memory. MFU is of that time, by the model's operations without recomputation.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # devices are asked for by a topology's name

import numpy as np
from report import RESULTS, machine

from jaxfb.config import Config, load_config
from jaxfb.mesh import mesh_sizes
from jaxfb.models.attention_kernels import splash_gradients
from jaxfb.models.config import flops_per_token
from jaxfb.planner import Topology, parse_topology
from jaxfb.planner.counts import num_microbatches, schedule_name
from jaxfb.planner.program_cost import hlo_cost
from jaxfb.planner.program_cost.branches import TakenBranches
from jaxfb.planner.program_cost.routing import Routed
from jaxfb.planner.verdict import estimated
from jaxfb.schedules import make

ROOT = Path(__file__).parent.parent
LIKE_DEEPSEEK = (
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


@dataclass(frozen=True)
class Job:
    """config, overrides: of jaxfb. maxtext: the same in keys of its base.yml; None where it has nothing like it."""

    config: str
    topology: str
    overrides: tuple[str, ...] = ()
    maxtext: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The rows of one kind of chip.

    script: the benchmark's file, which a row's own process runs. usual: the sides that are compiled unless others are
    asked for. environment: of that process. packages: whose versions the results name. settings: of all rows.
    config: (job, side) -> what is compiled. lower: (job, side, compiled) lowers a step and calls
    compiled(lowered, experts' work). compile: (lowered, job, side) -> (program, bytes that it needs).
    """

    script: Path
    jobs: Mapping[str, Job]
    sides: Sequence[str]
    usual: Sequence[str]
    environment: Mapping[str, str]
    packages: Sequence[str]
    settings: Mapping[str, Any]
    config: Callable[[Job, str], Config]
    lower: Callable[[Job, str, Callable], None]
    compile: Callable[[Any, Job, str], tuple[Any, float]]

    @property
    def results(self) -> Path:
        return RESULTS / f"{self.script.stem}.json"

    def has(self, name: str, side: str) -> bool:
        """Whether there is anything to compile."""
        return not side.startswith("maxtext") or self.jobs[name].maxtext is not None


def main(rows: Rows, about: str) -> None:
    asked = arguments(rows, about)
    if asked.one:
        row = measured(rows, asked.one, asked.sides[0], asked.keep)
        Path(asked.into).write_text(json.dumps(row))
        return
    for name in asked.only:
        for side in filter(lambda side: rows.has(name, side), asked.sides):
            again = asked.reread
            row = read_again(rows, name, side, again) if again else compile_row(rows, name, side, asked.keep)
            print(name, side, json.dumps(row), flush=True)
            save(rows, name, side, row)


def read_again(rows: Rows, name: str, side: str, folder: str) -> dict[str, Any]:
    """The row that is there, with what a kept program says to the reader of today."""
    text = text_path(folder, name, side).read_text()
    row = json.loads(rows.results.read_text())["rows"][name][side]
    work = Routed(**row["routed"]) if "routed" in row else None
    return row | numbers(text, rows.config(rows.jobs[name], side), rows.jobs[name].topology, work)


def compile_row(rows: Rows, name: str, side: str, keep: str | None) -> dict[str, Any]:
    """The row of one side, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "row.json"
        command = [sys.executable, str(rows.script), "--one", name, "--sides", side, "--into", str(into)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **rows.environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        subprocess.run([*command, *(["--keep", keep] if keep else [])], check=True, env=environment)
        return json.loads(into.read_text())


def measured(rows: Rows, name: str, side: str, keep: str | None) -> dict[str, Any]:
    """Lowers, compiles and reads one step."""
    row: dict[str, Any] = {}
    job = rows.jobs[name]

    def compiled(lowered, work=None):
        began, cpu = time.perf_counter(), time.process_time()
        program, needed = rows.compile(lowered, job, side)
        row["hbm_gb"] = gigabytes(needed)
        row["compile_s"] = round(time.perf_counter() - began, 1)
        row["compile_cpu_s"] = round(time.process_time() - cpu, 1)
        text = program.as_text()
        row["arguments_gb"] = gigabytes(program.memory_analysis().argument_size_in_bytes)
        if work is not None:
            row["routed"] = asdict(work)
        row.update(numbers(text, rows.config(job, side), job.topology, work))
        if keep:
            Path(keep).mkdir(parents=True, exist_ok=True)
            text_path(keep, name, side).write_text(text)
        return program

    rows.lower(job, side, compiled)
    return row | {"peak_memory_gb": gigabytes(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def text_path(folder: str, name: str, side: str) -> Path:
    return Path(folder, re.sub(r"\W+", "_", name) + f"_{side}.hlo")


def numbers(text: str, config: Config, topology_name: str, work: Routed | None = None) -> dict[str, Any]:
    """What a compiled program says of itself. work: of a device's experts, which no program contains."""
    topology = parse_topology(topology_name)
    mesh = layout(config, topology)
    cost = hlo_cost.cost_of(text, mesh, topology.chip, work, taken(config, mesh))
    tokens = config.batch.rows * config.data.sequence_length
    host, step = {}, cost.seconds
    moved = [row for (axes, _), row in cost.traffic.items() if axes == hlo_cost.HOST]
    waited = sum(row.exposed_seconds for row in moved)
    if moved:
        host = {"host_s": round(sum(row.seconds for row in moved), 3), "host_exposed_s": round(waited, 3)}
    if config.optimizer.memory == "host":
        host["host_gb"] = gigabytes(estimated(config, topology).estimate.host)
    flops = flops_per_token(sizes(config), config.data.sequence_length) * tokens / topology.num_devices
    return {
        "step_s": round(step, 3),
        **host,
        **({"one_kernel_of_gradients": True} if splash_gradients.NAME in text else {}),
        "work_s": round(cost.work_seconds, 3),
        "products_s": round(cost.product_seconds, 3),
        "collectives_s": round(
            sum(row.seconds for (axes, _), row in cost.traffic.items() if axes != hlo_cost.HOST), 3
        ),
        "exposed_s": round(cost.exposed_seconds - waited, 3),
        "mfu": round(flops / topology.chip.flops / step, 4),
        "moved_gb": round(cost.bytes / 1e9, 1),
        "traffic": {
            f"{axes} {kind}": {
                "count": round(one.count),
                "gb": gigabytes(one.bytes),
                "s": round(one.seconds, 3),
                "exposed_s": round(one.exposed_seconds, 3),
                "beside_products_gb": gigabytes(one.beside_products),
            }
            for (axes, kind), one in sorted(cost.traffic.items())
        },
    }


def taken(config: Config, mesh: SimpleNamespace) -> TakenBranches | None:
    """How often the ticks of a pipeline of jaxfb take their branches; other programs have no such branches."""
    pipe, pieces = config.mesh.pipe, config.parallel.pieces
    if pipe == 1:
        return None
    shape = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))  # an axis of -1 has its size here
    config = replace(config, mesh=replace(config.mesh, **shape))
    return TakenBranches(
        make(schedule_name(config), pipe, int(num_microbatches(config)), config.chunks, pieces).program
    )


def layout(config: Config, topology: Topology) -> SimpleNamespace:
    """What the reader asks of a mesh; all sides count the devices of theirs in this order."""
    shape = mesh_sizes(vars(config.mesh), topology.num_devices, "none")
    places = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    return SimpleNamespace(axis_names=tuple(shape), devices=places, size=places.size)


def jaxfb_config(job: Job) -> Config:
    return load_config(str(ROOT / "configs" / f"{job.config}.yaml"), job.overrides)


def sizes(config: Config):
    from jaxfb.planner.job import model_sizes

    return model_sizes(config)


def lower_jaxfb(config: Config, devices: list, compiled: Callable) -> None:
    """Lowers the step of `jaxfb train`."""
    from jaxfb.mesh import make_mesh
    from jaxfb.planner.job import make_job
    from jaxfb.planner.program_cost.routing import routed

    made = make_job(config, make_mesh(**vars(config.mesh), devices=devices))
    traced = made.step.trace(made.state, made.batch)
    work = routed(made, traced.jaxpr)
    compiled(traced.lower(), None if work == Routed() else work)


def save(rows: Rows, name: str, side: str, row: dict[str, Any]) -> None:
    """Puts one row into the results, in the order of the jobs."""
    before = json.loads(rows.results.read_text())["rows"] if rows.results.exists() else {}
    before.setdefault(name, {})[side] = row
    kept = {name: before[name] for name in rows.jobs if name in before}
    versions = machine() | {package: version(package) for package in rows.packages}
    whole = {"benchmark": rows.script.stem, "settings": rows.settings, "machine": versions, "rows": kept}
    rows.results.write_text(json.dumps(whole, indent=1) + "\n")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gigabytes(size: float) -> float:
    return round(size / 1e9, 3)


def arguments(rows: Rows, about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = [*rows.jobs]
    parser.add_argument("--only", nargs="+", default=jobs, choices=jobs, metavar="ROW")
    parser.add_argument("--sides", nargs="+", default=[*rows.usual], choices=rows.sides)
    parser.add_argument("--keep", metavar="DIR", help="the compiled programs' texts, too")
    parser.add_argument("--reread", metavar="DIR", help="compile nothing, read the texts of --keep again")
    parser.add_argument("--one", choices=jobs, help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    return parser.parse_args()
