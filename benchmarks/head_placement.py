"""Times each placement of the head in a pipeline, at a vocabulary of 128k.

    python benchmarks/head_placement.py                  # five minutes on two cores

pipe=4 on four simulated devices that share the machine's cores, 1f1b, one model, the same microbatches. "last"
lets every device of the lockstep run the whole head, "rows" a quarter of the rows each, "vocabulary" a quarter of
the vocabulary. Memory is the compiler's, bytes over the pipe axis are counted in the compiled program, times are
ratios within the run.
"""

from __future__ import annotations

import os
from dataclasses import asdict

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from report import interleaved, ratio, write

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

PIPE, ROWS, SEQ, NUM_MICROBATCHES, ROUNDS = 4, 4, 32, 4, 4
CONFIG = TransformerConfig(vocab_size=131_072, num_layers=4, hidden_size=128, num_heads=4, mlp_size=512)
PLACEMENTS = ("vocabulary", "rows", "last")


def main():
    mesh = jaxfb.make_mesh(pipe=PIPE, devices=jax.devices()[:PIPE])
    programs = {name: Placed(mesh, name) for name in PLACEMENTS}
    losses = {name: float(placed()) for name, placed in programs.items()}
    seconds = interleaved(programs, ROUNDS)
    rows = {
        name: placed.measured() | {"time_over_vocabulary": ratio(seconds, name, "vocabulary")}
        for name, placed in programs.items()
    }
    settings = {"pipe": PIPE, "rows_per_microbatch": ROWS, "seq": SEQ, "num_microbatches": NUM_MICROBATCHES}
    settings |= {"model": asdict(CONFIG), "dtype": "float32", "schedule": "1f1b"}
    write("head_placement", settings, {"losses": losses, "rows": rows})


class Placed:
    """A compiled forward_backward with the head in one place; a call runs it to the end."""

    def __init__(self, mesh, placement: str):
        model, plan = (
            transformer(CONFIG),
            jaxfb.BatchPlan(rows=ROWS * NUM_MICROBATCHES, rows_per_microbatch=ROWS),
        )
        fb = jaxfb.get_forward_backward_func(mesh, "1f1b", head_placement=placement)
        params = init_params(CONFIG, jax.random.key(0))
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), fb.param_specs(model, params))
        self._mesh, self._params, self._batch = mesh, jax.device_put(params, places), batch()
        call = jax.jit(lambda params, batch: fb(model, params, batch, plan))
        self._compiled = call.lower(self._params, self._batch).compile()

    def __call__(self):
        return jax.block_until_ready(self._compiled(self._params, self._batch)).loss

    def measured(self) -> dict:
        memory = self._compiled.memory_analysis()
        moved = [one for one in collectives(self._compiled.as_text()) if one.axes(self._mesh) == ("pipe",)]
        return {
            "params_mb": round(memory.argument_size_in_bytes / 1e6, 1),
            "gradients_mb": round(memory.output_size_in_bytes / 1e6, 1),
            "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
            "pipe_axis_mb": round(sum(one.bytes * one.times for one in moved) / 1e6, 1),
        }


def batch() -> dict:
    rng, shape = np.random.default_rng(0), (ROWS * NUM_MICROBATCHES, SEQ)
    tokens = {
        name: rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32) for name in ("tokens", "targets")
    }
    return tokens | {"loss_mask": jnp.ones(shape, jnp.float32)}


if __name__ == "__main__":
    main()
