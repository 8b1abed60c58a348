"""One setting of the GPU benchmark, compiled and run: `measure(sizes, setting, ...)`. What to measure says `gpu.py`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from report import peak_bytes

import jaxfb
from jaxfb.metrics import Pending
from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.models.transformer import init_params, transformer

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Setting:
    """What one measurement varies; the rest is the model's and does not change.

    rows:    of an update. size: of a microbatch. length: tokens of a row.
    segments: documents packed in each row; 0 gives the model no segments, so a row is one document.
    donated: the update writes its state where it read it.
    optimizer_memory: where the optimizer's state lies between updates.
    experts: of each layer, of which a token goes to two, together as wide as the model's MLP; 0 keeps the MLP.
    flags:   further XLA flags, which need a process of their own.
    """

    rows: int
    size: int
    length: int
    remat: str
    loss_chunk: int
    attention: str = "auto"
    segments: int = 0
    donated: bool = True
    optimizer_memory: str = "device"
    experts: int = 0
    flags: str = ""

    @property
    def tokens(self) -> int:
        """Of one update."""
        return self.rows * self.length


def measure(
    sizes: TransformerConfig, setting: Setting, steps: int, rate: float
) -> dict[str, float | str | int]:
    """The setting's fields, and what one update costs; a setting that does not fit says so.

    seconds_a_step:      median, the host waiting for each loss.
    seconds_a_step_ahead: mean, the host one update ahead as in the trainer; tokens and MFU are of these.
    mfu_of_measured_rate: of `rate`, operations counted by hand, none for recomputation.
    """
    try:
        return asdict(setting) | _measured(sizes, setting, steps, rate)
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        return asdict(setting) | {"result": "does not fit"}


def compiled_step(sizes: TransformerConfig, setting: Setting):
    """(compiled update, its state, its batch, its number of rows); nothing has run but the initialisation."""
    step, sizes = train_step(sizes, setting), model_of(sizes, setting)
    batch = jax.device_put(random_batch(sizes, setting), jax.devices()[0])
    shapes = step.abstract_state(lambda key: init_params(sizes, key))
    if setting.donated:
        compiled = step.lower(shapes, batch).compile()
    else:
        compiled = jax.jit(step).lower(shapes, batch, setting.rows).compile()
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit and peak_bytes(compiled) > limit:
        raise jax.errors.JaxRuntimeError(f"{OUT_OF_MEMORY}: {peak_bytes(compiled)} bytes of {limit}")
    return compiled, step.init(lambda key: init_params(sizes, key), 0), batch, setting.rows


def train_step(sizes: TransformerConfig, setting: Setting, devices=None) -> jaxfb.update.train_step.TrainStep:
    """The update as `jaxfb train` would make it, on the first device: bfloat16, AdamW, clipping."""
    return jaxfb.make_train_step(
        transformer(model_of(sizes, setting)),
        jaxfb.make_optimizer("adamw", learning_rate=1e-4, weight_decay=0.1),
        jaxfb.make_mesh(devices=(devices or jax.devices())[:1]),
        jaxfb.BatchPlan(rows=setting.rows, rows_per_microbatch=setting.size),
        max_grad_norm=1.0,
        dropout=False,
        compute_dtype="bfloat16",
        remat=setting.remat,
        optimizer_memory=setting.optimizer_memory,
    )


def model_of(sizes: TransformerConfig, setting: Setting) -> TransformerConfig:
    """The setting's model: these sizes, with its attention, blocks of logits and experts."""
    sizes = replace(sizes, attention=setting.attention, loss_chunk=setting.loss_chunk)
    if not setting.experts:
        return sizes
    return replace(
        sizes, num_experts=setting.experts, experts_per_token=2, expert_mlp_size=sizes.mlp_size // 2
    )


def random_batch(sizes: TransformerConfig, setting: Setting) -> dict[str, np.ndarray]:
    """Tokens that nothing can be learnt from but their frequencies: equal losses in every setting with equal rows."""
    rows, length = setting.rows, setting.length
    tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, (rows, length + 1), np.int32)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((rows, length), np.float32),
    }
    if not setting.segments:
        return batch
    edges = np.linspace(0, length, setting.segments + 1).astype(np.int32)
    segments = np.repeat(np.arange(1, setting.segments + 1, dtype=np.int32), np.diff(edges))
    positions = np.arange(length, dtype=np.int32) - np.repeat(edges[:-1], np.diff(edges))
    everywhere = {"segments": segments, "positions": positions}
    return batch | {name: np.broadcast_to(leaf, (rows, length)) for name, leaf in everywhere.items()}


def matmul_rate(m: int, k: int, n: int, pairs: int = 16) -> float:
    """Operations a second of bfloat16 products [m, k] @ [k, n] and [m, n] @ [n, k], chained in one program."""

    def chain(x, there, back):
        return jax.lax.fori_loop(0, pairs, lambda _, x: (x @ there) @ back, x)

    draw = lambda rows, columns: jax.random.normal(jax.random.key(0), (rows, columns), jnp.bfloat16)  # noqa: E731
    there, back = draw(k, n) / k**0.5, draw(n, k) / n**0.5
    return 2 * 2 * m * k * n * pairs / best_seconds(jax.jit(chain), draw(m, k), there, back)


def best_seconds(run, *arguments, rounds: int = 5) -> float:
    """Seconds of a call, the best of so many after one that compiles."""
    jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _measured(sizes, setting, steps, rate) -> dict:
    began = time.perf_counter()
    compiled, state, batch, rows = compiled_step(sizes, setting)
    compiled_in, seconds = time.perf_counter() - began, []
    for _ in range(steps + 1):
        began = time.perf_counter()
        state, metrics = compiled(state, batch, rows)
        loss = float(metrics.loss)
        seconds.append(time.perf_counter() - began)
    ahead = _seconds_ahead(compiled, state, batch, rows, steps)
    tokens = setting.tokens / ahead
    return {
        "seconds_a_step": round(median(seconds[1:]), 4),
        "seconds_a_step_ahead": round(ahead, 4),
        "tokens_per_second": round(tokens, 1),
        "mfu_of_measured_rate": round(
            tokens * flops_per_token(model_of(sizes, setting), setting.length) / rate, 4
        ),
        "compile_seconds": round(compiled_in, 1),
        "peak_gb": round(peak_bytes(compiled) / 1e9, 2),
        "temp_gb": round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 2),
        "loss": round(loss, 5),
    }


def _seconds_ahead(compiled, state, batch, rows, steps) -> float:
    """Of one update, the numbers of the one before being asked for while it runs."""
    pending, began = Pending(), time.perf_counter()
    for index in range(steps):
        state, metrics = compiled(state, batch, rows)
        pending.push(index, metrics)
    pending.flush()
    return (time.perf_counter() - began) / steps
