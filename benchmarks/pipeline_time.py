"""Compares the measured step times of pipeline schedules with those of `Schedule.simulate`.

    python benchmarks/pipeline_time.py                  # a few minutes on two cores

pipe=2 on two simulated devices with one thread each, forward and backward of the same model and microbatches. The
costs handed to `simulate` are measured in the same rounds, with both devices busy: of a stage's forward, of its
backward whole and in two parts, of the head. Seconds move with what else the machine does; only ratios within
one run say something.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from report import interleaved, ratio, write

import jaxfb
from jaxfb.forward_backward import Microbatches
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.slot import Slot
from jaxfb.forward_backward.layers.stage import Stage, Target
from jaxfb.forward_backward.sequential import layer_output, outer_params
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

PIPE, ROWS, SEQ, REPEATS = 2, 2, 64, 8
CONFIG = TransformerConfig(vocab_size=256, num_layers=4, hidden_size=256, num_heads=4, mlp_size=1024)
CHUNKS = {"interleaved": 2, "v_shape": 2}
REMAT, REMAT_COUNT = ("none", "selective", "layer", "full"), 8
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "v_shape", "gpipe")


def main():
    asked = arguments()
    mesh = jaxfb.make_mesh(pipe=PIPE, devices=jax.devices()[:PIPE])
    model, params = transformer(CONFIG), init_params(CONFIG, jax.random.key(0))
    steps = {
        f"{name} {count}": step(model, params, mesh, name, count)
        for count in asked.microbatches
        for name in asked.schedules
    }
    remats = {f"remat {remat}": step(model, params, mesh, "1f1b", REMAT_COUNT, remat) for remat in REMAT}
    seconds = interleaved(steps | remats | parts(model, params, mesh), asked.rounds)
    cost = {name: min(seconds[name]) / REPEATS for name in ("F", "B", "B input", "W", "head")}
    rows = {key: row(seconds, key, cost) for key in steps}
    settings = {
        "pipe": PIPE,
        "rows_per_microbatch": ROWS,
        "seq": SEQ,
        "model": asdict(CONFIG),
        "dtype": "float32",
    }
    settings |= {
        "remat": "none",
        "remat_over_none_at": f"1f1b {REMAT_COUNT}",
        "threads_per_device": 1,
        "chunks": CHUNKS,
        "rounds": asked.rounds,
    }
    over_none = {remat: ratio(seconds, f"remat {remat}", "remat none") for remat in REMAT}
    numbers = {"cost_of_a_stage_ms": milliseconds(cost), "remat_over_none": over_none, "rows": rows}
    write("pipeline_time", settings, numbers)
    print(table(rows, cost))


def step(model, params, mesh, name: str, count: int, remat: str = "none"):
    """Forward and backward of `count` microbatches, as a function that waits for its end."""
    fb = jaxfb.get_forward_backward_func(
        mesh, name, num_chunks=CHUNKS.get(name, 1), head_placement="last", remat=remat
    )
    plan = jaxfb.BatchPlan(rows=ROWS * count, rows_per_microbatch=ROWS)
    specs = fb.param_specs(model, params)
    place = lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec))  # noqa: E731
    params, batch = jax.tree.map(place, params, specs), microbatches(count)
    call = jax.jit(lambda params, batch: fb(model, params, Microbatches(batch), plan).grads)
    compiled = call.lower(params, batch).compile()
    return lambda: jax.block_until_ready(compiled(params, batch))


def microbatches(count: int) -> dict:
    rng, shape = np.random.default_rng(0), (count, ROWS, SEQ)
    batch = {
        name: rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32) for name in ("tokens", "targets")
    }
    return batch | {"loss_mask": np.ones(shape, np.float32)}


def parts(model, params, mesh) -> dict:
    """The parts of a tick, each REPEATS times in a loop, on both devices at once and with nothing between them."""
    stage = Stage(lambda *arguments: layer_output(model.layer(*arguments)))
    outer, inputs = (
        outer_params(params),
        StageInputs(jax.tree.map(lambda leaf: leaf[0], microbatches(1)), None),
    )
    length = CONFIG.num_layers // PIPE
    mine = jax.tree.map(lambda leaf: leaf[:length], params["layers"])
    layers = Layers(mine, jnp.arange(length), jnp.ones(length, bool))
    hidden = jax.random.normal(jax.random.key(1), (ROWS, SEQ, CONFIG.hidden_size))
    kept = slot(stage.residual(layers, hidden, inputs))
    sums = Target(jax.tree.map(lambda leaf: leaf[None], mine), jnp.int32(0), jnp.bool_(True))
    saved = slot(stage.saved(layers, hidden, {}, inputs))

    def head(x):
        loss = lambda o, h: next(iter(model.head(o, h, inputs.microbatch, None).terms.values())).total  # noqa: E731
        grads, before = jax.grad(loss, (0, 1))(outer, x)
        return before, grads

    def weight(x):
        not_constant = Slot(jax.tree.map(lambda leaf: leaf + x[0, 0, 0], saved.buffers), saved.index)
        return x, stage.backward_weight(layers, kept, not_constant, {}, inputs, sums)

    bodies = {
        "F": lambda x: stage.forward(layers, x, inputs, kept)[::2],
        "B": lambda x: stage.backward(layers, kept, x, {}, inputs, sums)[::-1],
        "B input": lambda x: stage.backward_input(layers, kept, x, {}, inputs, saved)[::-1],
        "W": weight,
        "head": head,
    }
    return {name: repeated(body, hidden, mesh) for name, body in bodies.items()}


def slot(shapes) -> Slot:
    """The only one, full of small numbers."""
    return Slot(jax.tree.map(lambda leaf: jnp.full((1, *leaf.shape), 1e-3, leaf.dtype), shapes), jnp.int32(0))


def repeated(body, hidden, mesh):
    """body: hidden -> (hidden, what else must be computed). REPEATS times on every device."""

    def once(carry, _):
        x, other = body(carry[0])
        touched = sum(leaf.ravel()[0].astype(jnp.float32) for leaf in jax.tree.leaves(other))
        return (x / (1 + jnp.abs(x).max()), carry[1] + touched), None

    def run(x):
        return lax.scan(once, (x, jnp.float32(0)), length=REPEATS)[0][1][None]

    call = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("pipe"), check_vma=False))
    compiled = call.lower(hidden).compile()
    return lambda: jax.block_until_ready(compiled(hidden))


def row(seconds: dict, key: str, cost: dict) -> dict:
    name, count = key.split()
    schedule = jaxfb.schedules.make(name, PIPE, int(count), CHUNKS.get(name, 1))
    whole = {"backward_input": cost["B"] / 2, "backward_weight": cost["B"] / 2}
    split = {"backward_input": cost["B input"], "backward_weight": cost["W"]}
    backward = split if schedule.splits_backward else whole
    simulated = schedule.simulate(forward=cost["F"], head=cost["head"], **backward)
    return {
        "measured_ms": round(min(seconds[key]) * 1e3, 2),
        "simulated_ms": round(simulated.time * 1e3, 2),
        "measured_over_simulated": round(min(seconds[key]) / simulated.time, 3),
        "over_1f1b": ratio(seconds, key, f"1f1b {count}"),
        "simulated_over_1f1b_at_equal_costs": round(
            at_equal_costs(name, count) / at_equal_costs("1f1b", count), 3
        ),
    }


def at_equal_costs(name: str, count: str) -> float:
    return jaxfb.schedules.make(name, PIPE, int(count), CHUNKS.get(name, 1)).simulate().time


def milliseconds(cost: dict) -> dict:
    return {name: round(value * 1e3, 3) for name, value in cost.items()}


def table(rows: dict, cost: dict) -> str:
    lines = [
        f"a stage: {milliseconds(cost)} ms",
        f"{'schedule M':16}{'ms':>9}{'simulated':>11}{'ratio':>7}{'/ 1f1b':>8}",
    ]
    for key, r in rows.items():
        over = r["over_1f1b"]["best_to_best"]
        lines.append(
            f"{key:16}{r['measured_ms']:>9}{r['simulated_ms']:>11}{r['measured_over_simulated']:>7}{over:>8.3f}"
        )
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--microbatches", nargs="+", type=int, default=(2, 4, 8, 16))
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
