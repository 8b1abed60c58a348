"""Times an update in parts, `step.gradients` and `step.apply`, beside the fused step, in one process.

python benchmarks/split_step.py           # two minutes on two cores; four simulated devices, data 2 x fsdp 2

Both start from states of their own and run in turn, so that a ratio within a round is of the same machine.
"""

from __future__ import annotations

import os

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from report import interleaved, ratio, write  # noqa: E402

import jaxfb  # noqa: E402
from jaxfb.models.config import TransformerConfig  # noqa: E402
from jaxfb.models.transformer import init_params, transformer  # noqa: E402

ROUNDS = 15
SIZES = {"vocab_size": 512, "num_layers": 4, "hidden_size": 256, "num_heads": 4}
ROWS, LENGTH, MOST = 16, 128, 1.03


def main() -> None:
    """Measures, prints and writes the ratio; fails where it is above MOST."""
    config = TransformerConfig(**SIZES)
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2, data_parallel=4)
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-3)
    mesh = jaxfb.make_mesh(data=2, fsdp=2)
    step = jaxfb.make_train_step(transformer(config), optimizer, mesh, plan, max_grad_norm=1.0)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, LENGTH + 1), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((ROWS, LENGTH), np.float32),
    }
    states = {
        name: step.init(init_params(config, jax.random.key(0)), donate=False) for name in ("fused", "split")
    }

    def fused() -> None:
        states["fused"], _ = jax.block_until_ready(step(states["fused"], batch))

    def split() -> None:
        state = states["split"]
        states["split"], _ = jax.block_until_ready(step.apply(state, step.gradients(state, batch)))

    seconds = interleaved({"fused": fused, "split": split}, ROUNDS)
    same = all(
        bool((a == b).all())
        for a, b in zip(*(jax.tree.leaves(states[name].params) for name in states), strict=True)
    )
    found = ratio(seconds, "split", "fused")
    settings = {"rounds": ROUNDS, "rows": ROWS, "length": LENGTH, "mesh": "data 2 x fsdp 2", **SIZES}
    rows = {f"time over that of the fused step, {how}": value for how, value in found.items()}
    write("split_step", settings, {"rows": rows, "same_parameters": same})
    if not same or min(found.values()) > MOST:
        raise SystemExit(f"an update in parts must give the same bits in at most {MOST} of the time")


if __name__ == "__main__":
    main()
