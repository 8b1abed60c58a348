"""What accumulation costs: one call over M microbatches against M calls of a jitted `value_and_grad`.

    python benchmarks/accumulation.py                   # a minute or two on two CPU cores
    python benchmarks/accumulation.py --hidden 1024 --layers 12 --dtype bfloat16 --seq 2048     # a GPU

and a whole update against `optax.MultiSteps` around the same optimizer: time, and peak bytes of the program.
All ratios are taken in one run, in interleaved rounds.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import interleaved, peak_bytes, ratio, temp_bytes, write

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import apply, init_params, transformer


def main():
    settings = arguments()
    config = TransformerConfig(
        vocab_size=settings.vocab,
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_heads=settings.hidden // 64,
        tied_embeddings=True,
    )
    model, params = transformer(config), init_params(config, jax.random.key(0))
    num = settings.num_microbatches
    batch = tokens(settings)
    plan = jaxfb.BatchPlan(rows=num * settings.rows, num_microbatches=num)

    fb = jaxfb.get_forward_backward_func(compute_dtype=settings.dtype)
    whole = jax.jit(lambda params, batch: fb(model, params, batch, plan)).lower(params, batch).compile()
    one_loss = loss_of_one(model, settings.dtype)
    one = jax.jit(jax.value_and_grad(one_loss)).lower(params, part(batch, 0, settings)).compile()
    parts = [part(batch, index, settings) for index in range(num)]

    optimizer = optax.adamw(1e-3)
    step = jaxfb.make_train_step(model, optimizer, None, plan, dropout=False, compute_dtype=settings.dtype)
    state = step.init(params)
    ours = step.lower(state, batch).compile()
    multi, carry, theirs = multi_steps(optimizer, one_loss, params, parts[0], num)
    hold = {"state": state, "carry": carry}
    programs = {"one_call": whole, "value_and_grad": one, "train_step": ours, "multi_steps": theirs}

    def run_calls():
        for each in parts:
            last = one(params, each)
        jax.block_until_ready(last)

    def run_ours():
        hold["state"], metrics = ours(hold["state"], batch, plan.rows)
        jax.block_until_ready((hold["state"], metrics))

    def run_theirs():
        for each in parts:
            hold["carry"], loss = theirs(hold["carry"], each)
        jax.block_until_ready((hold["carry"], loss))

    seconds = interleaved(
        {
            "one_call": lambda: jax.block_until_ready(whole(params, batch)),
            "calls": run_calls,
            "train_step": run_ours,
            "multi_steps": run_theirs,
        },
        settings.rounds,
    )
    write(
        "accumulation",
        vars(settings) | {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))},
        {
            "time_one_call_to_calls_of_value_and_grad": ratio(seconds, "one_call", "calls"),
            "time_train_step_to_multi_steps": ratio(seconds, "train_step", "multi_steps"),
            "peak_bytes": {name: peak_bytes(program) for name, program in programs.items()},
            "temp_bytes": {name: temp_bytes(program) for name, program in programs.items()},
            "optimizer_state_bytes": {
                "train_step": size_of(state.opt_state),
                "multi_steps": size_of(carry[1]),
            },
            "seconds": {name: [round(s, 5) for s in each] for name, each in seconds.items()},
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="rows of one microbatch")
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--dtype", default="float32", help="compute dtype; masters are float32")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


def tokens(settings) -> dict:
    shape = (settings.num_microbatches * settings.rows, settings.seq)
    drawn = np.random.default_rng(0).integers(0, settings.vocab, (shape[0], shape[1] + 1), dtype=np.int32)
    batch = {"tokens": drawn[:, :-1], "targets": drawn[:, 1:], "loss_mask": np.ones(shape, np.float32)}
    return jax.device_put(batch, jax.devices()[0])


def part(batch: dict, index: int, settings) -> dict:
    return {name: leaf[index * settings.rows : (index + 1) * settings.rows] for name, leaf in batch.items()}


def loss_of_one(model, dtype):
    """What one would write without jaxfb: the mean over one microbatch."""

    def loss(params, microbatch):
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return apply(model, cast, microbatch).terms["cross_entropy"].value

    return loss


def multi_steps(optimizer, loss, params, example, num_microbatches):
    """(MultiSteps, (params, state), compiled mini-step with its state donated)."""
    multi = optax.MultiSteps(optimizer, every_k_schedule=num_microbatches)

    def mini_step(carry, microbatch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, microbatch)
        updates, state = multi.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry = (jax.tree.map(jnp.copy, params), multi.init(params))
    return multi, carry, jax.jit(mini_step, donate_argnums=0).lower(carry, example).compile()


def size_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
