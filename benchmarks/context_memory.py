"""Compares a device's temporary memory for several sizes of the context axis, by the CPU's compiler.

python benchmarks/context_memory.py                  # two minutes on two cores; nothing is run, only compiled
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from report import temp_bytes, write

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.config_checks import CONTEXT_ATTENTION
from jaxfb.models.transformer import init_params, transformer

SIZES, LENGTH, ROWS = (1, 2, 4, 8), 2048, 2
MODEL = dict(vocab_size=256, num_layers=2, hidden_size=128, num_heads=8, mlp_size=256, loss_chunk=256)


def main():
    rows = {}
    for method in CONTEXT_ATTENTION:
        temp = {size: temp_bytes(compiled(method, size)) for size in SIZES}
        rows[method] = {f"context={size}": round(value / 1e6, 1) for size, value in temp.items()}
        rows[method]["of one device at 8"] = round(temp[8] / temp[1], 3)
        print(method, rows[method], flush=True)
    settings = {"length": LENGTH, "rows_per_microbatch": 1, "num_microbatches": ROWS, "dtype": "float32"}
    write("context_memory", settings | {"model": MODEL, "remat": "none"}, {"temp_mb_per_device": rows})


def compiled(method: str, size: int):
    """Forward and backward of two microbatches of one row."""
    config = TransformerConfig(**MODEL, context_attention=method)
    mesh = jaxfb.make_mesh(context=size, devices=jax.devices()[:size])
    fb, plan = jaxfb.get_forward_backward_func(mesh), jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=1)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32, "segments": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype) for name, dtype in dtypes.items()}
    model = transformer(config)
    call = jax.jit(lambda params, batch: fb(model, params, batch, plan).grads)
    return call.lower(params, batch).compile()


if __name__ == "__main__":
    main()
