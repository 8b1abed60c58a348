"""A 1B Llama-like model on one GPU: tokens a second and the share of the matmul rate measured beside it.

    jaxfb bench gpu              # all of it, on an accelerator; writes results/gpu_*.json
    jaxfb bench gpu --tiny       # the same code at a size for a CPU; prints, writes nothing

bfloat16 compute, float32 master parameters and gradient sums, AdamW, gradients accumulated over microbatches. The rate
is that of large bfloat16 products chained in one program on this device, in the same session. MFU counts the model's
operations by hand (`flops_per_token`), none for recomputation. What does not fit is said to be so, and is a result.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from report import write

import jaxfb
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.models.transformer import init_params, transformer

LLAMA_1B = TransformerConfig(
    vocab_size=128256, num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, mlp_size=8192,
    rope_theta=500_000.0, tied_embeddings=True,
)  # fmt: skip
TINY = TransformerConfig(
    vocab_size=256, num_layers=2, hidden_size=32, num_heads=2, mlp_size=64, tied_embeddings=True
)
ROWS = 16


def main() -> None:
    tiny = arguments().tiny
    model, length = (TINY, 32) if tiny else (LLAMA_1B, 4096)
    side, steps = (128, 2) if tiny else (8192, 8)
    rate = matmul_rate(side)
    numbers: dict = {"matmul_tflops": rate / 1e12, "microbatch_size": {}, "remat": {}, "context": {}}
    for size in (1, 2) if tiny else (1, 2, 4, 8):
        numbers["microbatch_size"][str(size)] = measured(model, length, ROWS, size, "selective", steps, rate)
    for remat in ("none", "selective", "full"):
        numbers["remat"][remat] = measured(model, length, ROWS, 1, remat, steps, rate)
    for long in (64, 128) if tiny else (8192, 32768):
        rows = max(1, ROWS * length // long)
        numbers["context"][str(long)] = measured(model, long, rows, 1, "full", steps, rate)
    settings = {
        "model": vars(model),
        "parameters": num_params(model),
        "length": length,
        "rows": ROWS,
        "steps": steps,
    }
    if tiny:
        print(json.dumps(numbers, indent=1))
    else:
        write("gpu", settings, numbers)


def measured(
    model: TransformerConfig, length: int, rows: int, size: int, remat: str, steps: int, rate: float
) -> dict[str, float | str]:
    """One setting: seconds of a step (median), tokens a second, share of the matmul rate, loss after the steps."""
    plan = jaxfb.BatchPlan(rows=rows, rows_per_microbatch=size)
    step = jaxfb.make_train_step(
        transformer(model), jaxfb.make_optimizer("adamw", learning_rate=1e-4, weight_decay=0.1),
        jaxfb.make_mesh(devices=jax.devices()[:1]), plan, max_grad_norm=1.0, dropout=False,
        compute_dtype="bfloat16", remat=remat,
    )  # fmt: skip
    try:
        state = step.init(lambda key: init_params(model, key), 0)
        batch = jax.device_put(random_batch(model, rows, length))
        began = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics.loss)
        compiled_in, seconds = time.perf_counter() - began, []
        for _ in range(steps):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            loss = float(metrics.loss)
            seconds.append(time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"result": "does not fit"}
    tokens = rows * length / median(seconds)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    found = {
        "seconds_a_step": round(median(seconds), 4),
        "tokens_per_second": round(tokens, 1),
        "mfu_of_measured_rate": round(tokens * flops_per_token(model, length) / rate, 4),
        "first_step_seconds": round(compiled_in, 1),
        "loss": round(loss, 5),
    }
    return found | ({"peak_gb_so_far": round(memory / 1e9, 2)} if memory else {})


def matmul_rate(side: int, count: int = 32) -> float:
    """Operations a second of `count` chained bfloat16 products [side, side], the best of five."""

    def chain(x, weight):
        return jax.lax.fori_loop(0, count, lambda _, y: y @ weight, x)

    weight = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16) / side**0.5
    run, seconds = jax.jit(chain), []
    run(weight, weight).block_until_ready()
    for _ in range(5):
        began = time.perf_counter()
        run(weight, weight).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 * count / min(seconds)


def random_batch(model: TransformerConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (rows, length + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((rows, length), np.float32),
    }


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a size for a CPU; nothing is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
