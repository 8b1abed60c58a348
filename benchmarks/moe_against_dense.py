"""Times a mixture of experts beside a dense model of equal active flops: forward and backward of one update.

    python benchmarks/moe_against_dense.py                # some minutes on two CPU cores; four simulated devices
    python benchmarks/moe_against_dense.py --hidden 2048 --width 1408 --experts 64 --per-token 6 --dtype bfloat16

The dense model's MLP is as wide as the experts of one token together. On one device, and with the experts cut over
`expert` beside the dense model with rows cut over `data`; and the grouped matmul by itself beside `lax.ragged_dot`.
All ratios are taken in one run, in interleaved rounds.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from report import interleaved, ratio, temp_bytes, write  # noqa: E402

import jaxfb  # noqa: E402
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params  # noqa: E402
from jaxfb.models.grouped_matmul import grouped_matmul  # noqa: E402
from jaxfb.models.transformer import init_params, transformer  # noqa: E402


def main():
    settings = arguments()
    configs = models(settings)
    batch = tokens(settings)
    programs = {name: program(config, batch, {}, settings) for name, config in configs.items()}
    count = min(4, jax.device_count())
    if count > 1:
        programs["dense_cut"] = program(configs["dense"], batch, {"data": count}, settings)
        programs["dropless_cut"] = program(configs["dropless"], batch, {"expert": count}, settings)
    seconds = interleaved({name: run for name, (run, _) in programs.items()}, settings.rounds)
    matmuls = interleaved(grouped(settings), settings.rounds)
    times = {f"{name}_to_dense": ratio(seconds, name, "dense") for name in configs if name != "dense"}
    if count > 1:
        times[f"dropless_to_dense_on_{count}_devices"] = ratio(seconds, "dropless_cut", "dense_cut")
    write(
        "moe_against_dense",
        vars(settings),
        {
            "time_of_forward_and_backward": times,
            "time_of_matmul_grouped_to_ragged_dot": ratio(matmuls, "matmul_grouped", "matmul_ragged_dot"),
            "time_of_matmul_grouped_to_dense": ratio(matmuls, "matmul_grouped", "matmul_dense"),
            "parameters": {name: num_params(config) for name, config in configs.items()},
            "flops_per_token": {
                name: flops_per_token(config, settings.seq) for name, config in configs.items()
            },
            "temp_bytes": {name: temp_bytes(compiled) for name, (_, compiled) in programs.items()},
            "seconds": {name: [round(s, 5) for s in each] for name, each in (seconds | matmuls).items()},
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=384, help="of one expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="of the update")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="compute dtype; masters are float32")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def models(settings) -> dict[str, TransformerConfig]:
    """A dense model, and one with experts in each mode."""
    sizes = {"vocab_size": settings.vocab, "num_layers": settings.layers, "hidden_size": settings.hidden}
    dense = TransformerConfig(
        **sizes,
        num_heads=settings.hidden // 64,
        mlp_size=settings.per_token * settings.width,
        tied_embeddings=True,
    )
    dropless = replace(
        dense,
        num_experts=settings.experts,
        experts_per_token=settings.per_token,
        expert_mlp_size=settings.width,
    )
    return {
        "dense": dense,
        "dropless": dropless,
        "capacity": replace(dropless, expert_capacity=1.25),
        "bias": replace(dropless, router_bias_rate=0.001),
        "batch_balance": replace(dropless, balance_coefficient=0.0, batch_balance_coefficient=0.01),
    }


def tokens(settings) -> dict:
    shape = (settings.rows, settings.seq)
    drawn = np.random.default_rng(0).integers(0, settings.vocab, (2, *shape), dtype=np.int32)
    return {"tokens": drawn[0], "targets": drawn[1], "loss_mask": np.ones(shape, np.float32)}


def program(config: TransformerConfig, batch: dict, sizes: dict, settings):
    """(a function that runs forward and backward of one update, the compiled program)."""
    mesh = jaxfb.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values(), 1]))])
    replicas = int(np.prod([*sizes.values(), 1]))
    plan = jaxfb.BatchPlan(
        rows=settings.rows, num_microbatches=settings.num_microbatches, data_parallel=replicas
    )
    fb = jaxfb.get_forward_backward_func(mesh, compute_dtype=settings.dtype)
    model, params = transformer(config), init_params(config, jax.random.key(0))
    compiled = jax.jit(lambda params, batch: fb(model, params, batch, plan)).lower(params, batch).compile()
    given = jax.device_put((params, batch), compiled.input_shardings[0])
    return lambda: jax.block_until_ready(compiled(*given)), compiled


def grouped(settings) -> dict:
    """Value and gradients of one matmul of all experts' rows, three ways; experts are used unevenly."""
    count = settings.rows * settings.seq * settings.per_token // settings.num_microbatches
    draw = np.random.default_rng(1)
    sizes = jnp.asarray(draw.multinomial(count, draw.dirichlet(np.full(settings.experts, 5.0))), jnp.int32)
    rows = jnp.asarray(draw.normal(size=(count, settings.hidden)), settings.dtype)
    kernels = jnp.asarray(
        draw.normal(size=(settings.experts, settings.hidden, settings.width)), settings.dtype
    )

    def timed(multiply):
        run = jax.jit(
            jax.value_and_grad(lambda r, k: (multiply(r, k).astype(jnp.float32) ** 2).sum(), (0, 1))
        )
        return lambda: jax.block_until_ready(run(rows, kernels))

    return {
        "matmul_grouped": timed(lambda r, k: grouped_matmul(r, k, sizes)),
        "matmul_ragged_dot": timed(lambda r, k: jax.lax.ragged_dot(r, k, sizes)),
        "matmul_dense": timed(lambda r, k: r @ k[0]),
    }


if __name__ == "__main__":
    main()
