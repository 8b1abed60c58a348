"""Times the passes of post-training over rows of unequal length: padded microbatches, a token budget, packed rows.

    python benchmarks/rl_throughput.py            # some minutes on two CPU cores
    python benchmarks/rl_throughput.py --tiny     # seconds; prints, writes nothing

One rollout after the other, of log-normal lengths (a long tail): the log-prob pass over all of its rows and the policy
updates of one epoch, each with the plans that a `RolloutPlan` holds. What differs is the plans alone:

    padded    microbatches of a fixed number of rows, every row as long as the longest may be
    budget    max_tokens_per_microbatch: rows padded to the longest of their update (its width of four)
    packed    the same with packing=True: several rows in one array row, work shared out by Karmarkar and Karp

Gradients are proved equal first. Tokens are those of rows, never padding; the host's arranging is part of the time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import jax
import numpy as np
from report import interleaved, ratio, write

import jaxfb
from jaxfb.data.token_rows import prompt_and_response, token_rows
from jaxfb.forward_backward import Packed
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.transformer import init_params, transformer

MODEL = TransformerConfig(vocab_size=4096, num_layers=4, hidden_size=256, num_heads=4, tied_embeddings=True)
TINY = TransformerConfig(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, tied_embeddings=True)
SAMPLES = 4
ROLLOUTS = 3
AGREEMENT = 1e-4


@dataclass(frozen=True)
class Sizes:
    """prompts of a rollout, with SAMPLES rows each; rows of an update; rows of a padded microbatch; slots of a row."""

    prompts: int
    rows_per_update: int
    rows_per_microbatch: int
    length: int

    def plan(self, cut: dict[str, Any]) -> jaxfb.RolloutPlan:
        rows = self.prompts * SAMPLES
        plans = {
            "train": jaxfb.BatchPlan("train", rows=self.rows_per_update, **cut),
            "logprob_old": jaxfb.BatchPlan("logprob_old", rows=rows, **cut),
        }
        return jaxfb.RolloutPlan(
            plans, prompts=self.prompts, samples_per_prompt=SAMPLES, rows_per_update=self.rows_per_update,
            rollouts=ROLLOUTS,
        )  # fmt: skip

    def plans(self) -> dict[str, jaxfb.RolloutPlan]:
        budget = {
            "max_tokens_per_microbatch": self.rows_per_microbatch * self.length,
            "sequence_length": self.length,
        }
        cuts = {
            "padded": {"rows_per_microbatch": self.rows_per_microbatch},
            "budget": budget,
            "packed": budget | {"packing": True},
        }
        return {name: self.plan(cut) for name, cut in cuts.items()}


class Passes:
    """The passes over one rollout after the other under one plan; `seen` are the shapes that were compiled."""

    def __init__(self, config: TransformerConfig, plan: jaxfb.RolloutPlan, rollouts: list[dict]):
        model, mesh = transformer(config), jaxfb.make_mesh(devices=jax.devices()[:1])
        self.plan, self._rollouts = plan, rollouts
        self._scored, self._updated = 0, 0
        self.forward = jaxfb.get_forward_backward_func(mesh)
        self._log_probs = jaxfb.log_prob_fn(model)
        self.policy = jaxfb.policy_loss_fn(model, jaxfb.PolicyLoss())
        optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-4)
        self._step = jaxfb.make_train_step(
            self.policy, optimizer, mesh, plan.train, max_grad_norm=1.0, dropout=False
        )
        self._state = self._step.init(lambda key: init_params(config, key))
        self.params = jax.tree.map(np.asarray, self._state.params)

    def log_prob_pass(self) -> None:
        """All rows of the next rollout; log-probs come back to the host in their order."""
        rows = self._rollouts[self._scored % ROLLOUTS]
        self._scored += 1
        out = self.forward(
            self._log_probs, self.params, rows, self.plan.plan("logprob_old"), forward_only=True
        )
        jax.tree.map(np.asarray, out.outputs)

    def policy_updates(self) -> None:
        """One epoch over the next rollout."""
        rollout = self._updated % ROLLOUTS
        self._updated += 1
        for batch in self.batches(rollout):
            self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready(metrics.loss)

    def batches(self, rollout: int) -> list[dict]:
        """The rows of each update of an epoch."""
        updates = self.plan.updates_per_rollout
        chosen = [list(self.plan.update(rollout * updates + each).rows) for each in range(updates)]
        return [{name: leaf[rows] for name, leaf in self._rollouts[rollout].items()} for rows in chosen]

    def shapes(self, purpose: str) -> list[tuple[jaxfb.BatchPlan, int, float]]:
        """(plan, width, padding share) of every call of the passes over all rollouts."""
        plan, wholes = self.plan.plan(purpose), self._rollouts
        if purpose == "train":
            wholes = [batch for rollout in range(ROLLOUTS) for batch in self.batches(rollout)]
        return [shape_of(batch, plan) for batch in wholes]


def shape_of(batch: dict, plan: jaxfb.BatchPlan) -> tuple[jaxfb.BatchPlan, int, float]:
    if plan.by_tokens:
        packed = Packed(batch, plan)
        return packed.plan, packed.arrangement.width, packed.padding_fraction
    width = batch["segments"].shape[1]
    return plan, width, 1 - batch["segments"].sum() / (plan.padded_rows * width)


def main() -> None:
    asked = arguments()
    config, sizes = (TINY, Sizes(2, 4, 2, 32)) if asked.tiny else (MODEL, Sizes(8, 16, 4, 384))
    rollouts = [rollout(config, sizes, number) for number in range(ROLLOUTS)]
    passes = {name: Passes(config, plan, rollouts) for name, plan in sizes.plans().items()}
    apart = gradients_apart(passes)
    if max(apart.values()) > AGREEMENT:
        raise SystemExit(f"[rl_throughput] gradients of the same update lie apart by {apart}")
    runs = {f"log-prob pass: {name}": each.log_prob_pass for name, each in passes.items()}
    runs |= {f"policy updates: {name}": each.policy_updates for name, each in passes.items()}
    for run in runs.values():
        for _ in range(
            ROLLOUTS - 1
        ):  # and once more in `interleaved`: all shapes compile before the clock runs
            run()
    seconds = interleaved(runs, ROLLOUTS * asked.passes)
    tokens = mean(int(rows["segments"].sum()) for rows in rollouts)
    table = {
        name: {"tokens_per_second": round(tokens / mean(seconds[name])), **ratios(seconds, name)}
        | said_of(passes[name.split(": ")[1]], "logprob_old" if "log-prob" in name else "train")
        for name in runs
    }
    numbers = {"rows": table, "gradient_difference": {n: float(f"{a:.1e}") for n, a in apart.items()}}
    if asked.tiny:
        print(json.dumps(numbers, indent=1))
        return
    settings = {
        "model": asdict(config), "parameters": num_params(config), "rows": sizes.prompts * SAMPLES,
        "tokens": tokens, **vars(sizes), "rollouts": ROLLOUTS, "passes": asked.passes,
    }  # fmt: skip
    write("rl_throughput", settings, numbers)


def rollout(config: TransformerConfig, sizes: Sizes, number: int) -> dict[str, np.ndarray]:
    """Rows of a prompt and a response; one response is as long as may be, most are about an eighth of it."""
    random, rows, longest = np.random.default_rng(number), sizes.prompts * SAMPLES, sizes.length + 1
    prompt = longest // 16
    lengths = np.clip(random.lognormal(np.log(longest / 8), 0.9, rows), 2, longest - prompt).astype(int)
    lengths[0] = longest - prompt
    pairs = [
        prompt_and_response(*np.split(random.integers(0, config.vocab_size, prompt + length), [prompt]))
        for length in lengths
    ]
    leaves = token_rows([ids for ids, _ in pairs], [counts for _, counts in pairs], sizes.length)
    drawn = np.where(leaves["loss_mask"] > 0, random.standard_normal(leaves["tokens"].shape), 0)
    uniform = np.where(leaves["loss_mask"] > 0, -np.log(config.vocab_size), 0)
    return leaves | {"advantages": np.float32(drawn), "old_log_probs": np.float32(uniform)}


def gradients_apart(passes: dict[str, Passes]) -> dict[str, float]:
    """Largest difference of a leaf's gradient to that of the padded rows, of the leaf's largest entry."""
    batch = passes["padded"].batches(0)[0]
    found = {
        name: jax.tree.leaves(each.forward(each.policy, each.params, batch, each.plan.train).grads)
        for name, each in passes.items()
    }

    def apart(one, other) -> float:
        return float(np.abs(np.asarray(one) - np.asarray(other)).max() / np.abs(np.asarray(other)).max())

    return {name: max(map(apart, leaves, found["padded"])) for name, leaves in found.items()}


def ratios(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    found = ratio(seconds, name, f"{name.split(': ')[0]}: padded")
    return {"time_to_padded": found["median_of_rounds"], "time_to_padded_best": found["best_to_best"]}


def said_of(passes: Passes, purpose: str) -> dict[str, float]:
    shapes = passes.shapes(purpose)
    return {
        "padding_share": round(mean(padding for *_, padding in shapes), 4),
        "microbatches": round(mean(plan.num_microbatches for plan, *_ in shapes), 2),
        "programs": len({(plan, width) for plan, width, _ in shapes}),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=2, help="over all rollouts")
    parser.add_argument("--tiny", action="store_true", help="a small size; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
