"""Times our train step beside MaxText's, on CPU, in one process: the same parameters, tokens, AdamW and clipping.

    python3.12 -m venv maxtext_env
    maxtext_env/bin/pip install --no-deps maxtext==0.2.5
    maxtext_env/bin/pip install -r benchmarks/maxtext_requirements.txt && maxtext_env/bin/pip install --no-deps -e .
    maxtext_env/bin/python benchmarks/against_maxtext.py                   # ten minutes on two cores

Eight simulated devices share the cores, and of small operators they spend much time in taking turns; the rows of one
device say more about the time of a step; `cpu_seconds` is the work of all cores together, whoever else is on them.
Both steps start from MaxText's initial parameters and stay together: losses and gradient norms of every update are
compared. Both keep the input of each layer and compute the layer again (MaxText's remat "full" is our "layer").
Memory, reductions and their bytes are read from the two compiled programs; XLA for CPU leaves a reduction in the loop
it was written in, which XLA for TPU may move.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, replace

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax
import numpy as np
import optax
from maxtext_step import MaxTextStep, Step
from report import interleaved, ratio, temp_bytes, write

import jaxfb
from jaxfb.forward_backward import Microbatches, specs_of, split
from jaxfb.hlo import collectives
from jaxfb.mesh import data_parallel
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import transformer
from jaxfb.parallel.sharding import shardings

SEQ, MAX_GRAD_NORM = 128, 1.0
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SMALL = TransformerConfig(vocab_size=1024, num_layers=8, hidden_size=128, num_heads=4, mlp_size=512)
WIDE = TransformerConfig(vocab_size=4096, num_layers=4, hidden_size=512, num_heads=8, mlp_size=2048)
GRADIENT = 10_000  # bytes; smaller reductions are of records


@dataclass(frozen=True)
class Row:
    """One comparison. rows: of a microbatch, over all replicas. chunks: of a stage; MaxText's pipeline repeats."""

    mesh: dict[str, int]
    num_microbatches: int
    rows: int
    schedules: tuple[str, ...] = ("",)
    chunks: int = 1
    model: TransformerConfig = SMALL

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())


PIPES = {"pipe": 4, "data": 2}
ROWS = {
    "1 device, 8 microbatches": Row({}, 8, 8),
    "1 device, wide, 8 microbatches": Row({}, 8, 2, model=WIDE),
    "data 8, 1 microbatch": Row({"data": 8}, 1, 64),
    "data 8, 4 microbatches": Row({"data": 8}, 4, 16),
    "data 8, 8 microbatches": Row({"data": 8}, 8, 8),
    "fsdp 8, 8 microbatches": Row({"fsdp": 8}, 8, 8),
    **{
        f"pipe 4, data 2, {count} microbatches": Row(PIPES, count, 2, ("1f1b", "zero_bubble"))
        for count in (8, 16, 32)
    },
    **{
        f"pipe 4, data 2, 2 chunks, {count} microbatches": Row(PIPES, count, 2, ("interleaved",), chunks=2)
        for count in (8, 32)
    },
}


def main():
    asked = arguments()
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's trainer does
    jax.config.update("jax_enable_compilation_cache", False)
    tables: dict[str, dict] = {}
    for name, row in ROWS.items():
        if asked.rows and not any(part in name for part in asked.rows):
            continue
        for key, numbers in compared(row, asked.rounds).items():
            for table, entries in numbers.items():
                tables.setdefault(table, {})[", ".join(filter(None, (name, key)))] = entries
            print(name, key, numbers, flush=True)
    settings = {
        "seq": SEQ,
        "dtype": "float32",
        "remat": "layer; MaxText's full",
        "adamw": ADAMW,
        "max_grad_norm": MAX_GRAD_NORM,
    }
    settings |= {"model": shape(SMALL), "wide": shape(WIDE), "rounds": asked.rounds, "maxtext": "0.2.5"}
    write("against_maxtext", settings, tables)


def shape(model: TransformerConfig) -> dict:
    """The sizes that the benchmark chose; everything else is a default."""
    return {
        name: getattr(model, name)
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "mlp_size")
    }


def compared(row: Row, rounds: int) -> dict[str, dict]:
    """Schedule ("" without a pipeline) -> {table: {column: number}}."""
    shape = (row.num_microbatches * row.rows, SEQ + 1)
    tokens = np.random.default_rng(0).integers(0, row.model.vocab_size, shape, dtype=np.int32)
    theirs = MaxTextStep(options(row), jax.devices()[: row.num_devices], tokens, row.model.num_layers)
    ours = {schedule: OurStep(row, schedule, theirs, tokens) for schedule in row.schedules}
    seconds = interleaved({"maxtext": theirs.run} | {name: step.run for name, step in ours.items()}, rounds)
    return {name: tables(seconds, name, step, theirs) for name, step in ours.items()}


def options(row: Row) -> dict:
    """The row as keys of MaxText's base.yml."""
    model, size = row.model, {"data": 1, "fsdp": 1, "pipe": 1} | row.mesh
    given = {
        "decoder_block": "llama2",
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.hidden_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "base_mlp_dim": model.mlp_size,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_target_length": SEQ,
        "attention": "dot_product",
        "dtype": "float32",
        "weight_dtype": "float32",
        "remat_policy": "full",
        "gradient_clipping_threshold": MAX_GRAD_NORM,
        "ici_data_parallelism": size["data"],
        "ici_fsdp_parallelism": size["fsdp"],
        **{f"adam_{name}": ADAMW[name] for name in ("b1", "b2", "eps", "weight_decay")},
    }
    if size["pipe"] == 1:
        accumulated = {"gradient_accumulation_steps": row.num_microbatches}
        return given | accumulated | {"per_device_batch_size": row.rows // row.num_devices}
    in_stage = model.num_layers // (size["pipe"] * row.chunks)
    return given | {
        "ici_pipeline_parallelism": size["pipe"],
        "num_pipeline_microbatches": row.num_microbatches,
        "num_layers_per_pipeline_stage": in_stage,
        "scan_layers": in_stage == 1,
        "per_device_batch_size": row.num_microbatches * row.rows // row.num_devices,
    }


class OurStep(Step):
    """Our train step from MaxText's parameters, on the same tokens."""

    def __init__(self, row: Row, schedule: str, theirs: MaxTextStep, tokens: np.ndarray):
        mesh = jaxfb.make_mesh(**row.mesh, devices=jax.devices()[: row.num_devices])
        rows, replicas = row.num_microbatches * row.rows, data_parallel(mesh)
        plan = jaxfb.BatchPlan(rows=rows, data_parallel=replicas, num_microbatches=row.num_microbatches)
        step = jaxfb.make_train_step(
            with_their_scale(transformer(row.model), row.model),
            optax.adamw(theirs.learning_rate, **ADAMW),
            mesh,
            plan,
            max_grad_norm=MAX_GRAD_NORM,
            dropout=False,
            remat="layer",
            schedule=schedule or None,
            num_chunks=row.chunks,
        )
        self.state, self._batch, self._rows = step.init(theirs.params), placed(tokens, plan, mesh), plan.rows
        super().__init__(mesh, lambda: step.lower(self.state, self._batch))

    def update(self):
        self.state, metrics = self.compiled(self.state, self._batch, self._rows)
        return metrics.loss, metrics.grad_norm


def with_their_scale(model: jaxfb.Pipelined, config: TransformerConfig) -> jaxfb.Pipelined:
    """MaxText divides the initial query weights by sqrt(head_size), and no scores; ours divides the scores."""

    def layer(params, *others):
        attention = params["attention"]
        query = {"kernel": attention["query"]["kernel"] * config.head_size**0.5}
        return model.layer(params | {"attention": attention | {"query": query}}, *others)

    return replace(model, layer=layer)


def placed(tokens: np.ndarray, plan: jaxfb.BatchPlan, mesh) -> Microbatches:
    """The fields of a language model's batch, split and placed as a loader does it."""
    inputs = tokens[:, :-1]
    batch = {
        "tokens": inputs,
        "targets": tokens[:, 1:],
        "loss_mask": np.ones(inputs.shape, np.float32),
        "segments": np.ones_like(inputs),
        "positions": np.tile(np.arange(SEQ, dtype=np.int32), (len(inputs), 1)),
    }
    leaves = split(batch, plan).leaves
    return Microbatches(jax.device_put(leaves, shardings(specs_of(leaves, mesh), mesh)))


def tables(seconds: dict, name: str, ours: OurStep, theirs: MaxTextStep) -> dict[str, dict[str, float]]:
    both = {"jaxfb": ours, "maxtext": theirs}
    times = {"jaxfb_ms": min(seconds[name]) * 1e3, "maxtext_ms": min(seconds["maxtext"]) * 1e3}
    times["cpu_seconds_best_to_best"] = min(ours.cpu_seconds) / min(theirs.cpu_seconds)
    temp = {which: temp_bytes(step.compiled) / 1e6 for which, step in both.items()}
    start_up = {
        f"{which}_{part}": round(step.start_up[part], 2)
        for part in ("lower", "compile")
        for which, step in both.items()
    }
    return {
        "step_time_over_maxtext": ratio(seconds, name, "maxtext") | rounded(times),
        "temp_mb": rounded(temp | {"jaxfb_over_maxtext": temp["jaxfb"] / temp["maxtext"]}),
        "gradient_reductions": {
            f"{which}_{what}": value
            for which, step in both.items()
            for what, value in reductions(step).items()
        },
        "start_up_cpu_s": start_up,
        "largest_difference_over_updates": {
            "loss": difference(ours.losses, theirs.losses),
            "relative_gradient_norm": difference(ours.grad_norms, theirs.grad_norms, relative=True),
        },
    }


def reductions(step: Step) -> dict[str, float]:
    """How often one update sums gradients over replicas, and how many bytes on a device."""
    found = [
        one
        for one in collectives(step.compiled.as_text())
        if one.kind in ("all-reduce", "reduce-scatter")
        and one.bytes > GRADIENT
        and {"data", "fsdp"} & set(one.axes(step.mesh))
    ]
    size = sum(one.times * one.bytes for one in found)
    return {"times": sum(one.times for one in found), "mb": round(size / 1e6, 2)}


def difference(ours: list, theirs: list, relative: bool = False) -> float:
    a, b = (np.array([float(value) for value in values]) for values in (ours, theirs))
    return float(np.max(np.abs(a - b) / (b if relative else 1)))


def rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in numbers.items()}


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", help="parts of the names of the rows to run; all if not given")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
