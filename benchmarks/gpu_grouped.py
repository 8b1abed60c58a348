"""Products of experts alone: by kernels, by loops over tiles, and dense ones of as many operations. Beside `gpu.py`."""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from gpu_step import Setting

from jaxfb.models.config import TransformerConfig
from jaxfb.models.grouped_matmul import TILE_OF_GPUS, tiled_outer_product, tiled_product

CALLS, ROUNDS = 5, 3
SUMS = 3  # the argument that the gradient is added to, in place


def grouped(sizes: TransformerConfig, setting: Setting, experts: int) -> dict[str, float]:
    """Teraflops a second of the rows of a microbatch, each token's twice, by the matrices of unevenly many experts."""
    rows, width, inner = 2 * setting.size * setting.length, sizes.hidden_size, sizes.mlp_size // 2
    spread = np.random.default_rng(0).dirichlet(np.full(experts, 20.0))
    runs = jnp.asarray(np.random.default_rng(0).multinomial(rows, spread), jnp.int32)
    draw = lambda *shape: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)  # noqa: E731
    before, matrices, after = draw(rows, width), draw(experts, width, inner), draw(rows, inner)
    given = {
        "product": lambda: [before, matrices, runs],
        "transposed": lambda: [after, matrices, runs],
        "gradient": lambda: [before, after, runs, jnp.zeros((experts, width, inner)), jnp.float32(1)],
    }
    operations = 2 * rows * width * inner
    return {
        f"{what} by {way}": round(operations / seconds(run, given[what]()) / 1e12, 4)
        for what, of_way in ways(on_gpu=jax.default_backend() == "gpu").items()
        for way, run in of_way.items()
    }


def ways(on_gpu: bool) -> dict[str, dict]:
    """What is multiplied, and by what; elsewhere than on a GPU the kernels are interpreted."""
    from jaxfb.models import grouped_kernels  # which a later JAX may not have; the other parts do not need it

    how = {"interpret": not on_gpu}
    kernel, kernel_of_gradient = (
        partial(run, **how) for run in (grouped_kernels.product, grouped_kernels.outer_product)
    )
    loop = partial(tiled_product, most=TILE_OF_GPUS)
    return {
        "product": {
            "kernel": kernel,
            "loop": loop,
            "one matrix": lambda rows, matrices, _: rows @ matrices[0],
        },
        "transposed": {
            "kernel": partial(kernel, transposed=True),
            "loop": lambda rows, matrices, runs: loop(rows, matrices.swapaxes(1, 2), runs),
            "one matrix": lambda rows, matrices, _: rows @ matrices[0].T,
        },
        "gradient": {
            "kernel": kernel_of_gradient,
            "loop": partial(tiled_outer_product, most=TILE_OF_GPUS),
            "one matrix": lambda rows, after, _, sums, begun: sums.at[0].add(
                jnp.matmul(rows.T, after, preferred_element_type=sums.dtype)
            ),
        },
    }


def seconds(run, arguments: list) -> float:
    """Seconds of a call, the best of rounds of several calls that follow each other without the host waiting."""
    adds = len(arguments) > SUMS
    run, best = jax.jit(run, donate_argnums=(SUMS,) if adds else ()), float("inf")
    for _ in range(1 + ROUNDS):  # the first one compiles
        began = time.perf_counter()
        for _ in range(CALLS):
            out = run(*arguments)
            if adds:
                arguments[SUMS] = out
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - began) / CALLS)
    return best
