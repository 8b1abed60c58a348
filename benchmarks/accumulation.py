"""Compares one call over M microbatches with M calls of a jitted `value_and_grad`, in time and memory.

    python benchmarks/accumulation.py                   # a minute or two on two CPU cores
    python benchmarks/accumulation.py --hidden 1024 --layers 12 --dtype bfloat16 --seq 2048     # a GPU

Also compares a whole update with `optax.MultiSteps` around the same optimizer: time, and peak bytes of the program.
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
from jaxfb.forward_backward.sequential import sequential
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer


def main():
    settings = arguments()
    config = TransformerConfig(
        vocab_size=settings.vocab,
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_heads=settings.hidden // 64,
        tied_embeddings=True,
    )
    params = init_params(config, jax.random.key(0))
    calls, steps = Calls(settings, transformer(config), params), Steps(settings, transformer(config), params)
    seconds = interleaved(calls.runs | steps.runs, settings.rounds)
    programs = calls.programs | steps.programs
    numbers = {
        "time_one_call_to_calls_of_value_and_grad": ratio(seconds, "one_call", "calls"),
        "time_train_step_to_multi_steps": ratio(seconds, "train_step", "multi_steps"),
        "peak_bytes": {name: peak_bytes(program) for name, program in programs.items()},
        "temp_bytes": {name: temp_bytes(program) for name, program in programs.items()},
        "optimizer_state_bytes": steps.optimizer_state_bytes,
        "seconds": {name: [round(s, 5) for s in each] for name, each in seconds.items()},
    }
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    write("accumulation", vars(settings) | {"parameters": parameters}, numbers)


class Calls:
    """All microbatches in one call of ours, and one call of value_and_grad for each."""

    def __init__(self, settings, model, params):
        batch = tokens(settings)
        fb = jaxfb.get_forward_backward_func(compute_dtype=settings.dtype)
        whole = jax.jit(lambda params, batch: fb(model, params, batch, plan_of(settings)))
        self._whole = whole.lower(params, batch).compile()
        self._params, self._batch, self._parts = params, batch, parts_of(batch, settings)
        one = jax.jit(jax.value_and_grad(loss_of_one(model, settings.dtype)))
        self._one = one.lower(params, self._parts[0]).compile()
        self.programs = {"one_call": self._whole, "value_and_grad": self._one}
        self.runs = {"one_call": self._one_call, "calls": self._calls}

    def _one_call(self):
        jax.block_until_ready(self._whole(self._params, self._batch))

    def _calls(self):
        for each in self._parts:
            last = self._one(self._params, each)
        jax.block_until_ready(last)


class Steps:
    """Our train step, and optax.MultiSteps around the same AdamW."""

    def __init__(self, settings, model, params):
        optimizer, plan = optax.adamw(1e-3), plan_of(settings)
        self._batch, self._parts, self._rows = (
            tokens(settings),
            parts_of(tokens(settings), settings),
            plan.rows,
        )
        step = jaxfb.make_train_step(
            model, optimizer, None, plan, dropout=False, compute_dtype=settings.dtype
        )
        self._state = step.init(params)
        self._ours = step.lower(self._state, self._batch).compile()
        one_loss, num = loss_of_one(model, settings.dtype), settings.num_microbatches
        _, self._carry, self._theirs = multi_steps(optimizer, one_loss, params, self._parts[0], num)
        self.programs = {"train_step": self._ours, "multi_steps": self._theirs}
        self.runs = {"train_step": self._train_step, "multi_steps": self._multi_steps}

    @property
    def optimizer_state_bytes(self) -> dict[str, int]:
        return {"train_step": size_of(self._state.opt_state), "multi_steps": size_of(self._carry[1])}

    def _train_step(self):
        self._state, metrics = self._ours(self._state, self._batch, self._rows)
        jax.block_until_ready((self._state, metrics))

    def _multi_steps(self):
        for each in self._parts:
            self._carry, loss = self._theirs(self._carry, each)
        jax.block_until_ready((self._carry, loss))


def plan_of(settings) -> jaxfb.BatchPlan:
    num = settings.num_microbatches
    return jaxfb.BatchPlan(rows=num * settings.rows, num_microbatches=num)


def parts_of(batch: dict, settings) -> list[dict]:
    return [part(batch, index, settings) for index in range(settings.num_microbatches)]


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
        return sequential(model)(cast, microbatch, None).terms["cross_entropy"].value

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
