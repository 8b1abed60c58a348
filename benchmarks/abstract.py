"""Arguments of a step or a call in shapes alone, for benchmarks that compile and never run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.sharding import abstract, shardings
from jaxfb.planner import tpu

DTYPES = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}


def abstract_params(fb, config):
    """The transformer's parameters where `fb` wants them."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return abstract(shapes, shardings(fb.param_specs(transformer(config), shapes), fb.mesh))


def abstract_batch(*shape: int, sharding=None) -> dict[str, jax.ShapeDtypeStruct]:
    """Tokens, targets and mask, each of that shape."""
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in DTYPES.items()}


def compiled_for_tpu(lowered) -> tuple[jax.stages.Compiled, float]:
    """(the program, MB of HBM that its compiler plans, arguments included)."""
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(tpu.report_into(Path(folder)))
        return program, round(tpu.reported_bytes(Path(folder)) / 1e6, 2)
