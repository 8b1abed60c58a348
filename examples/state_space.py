"""A state-space model of your own through every schedule: Mamba-2's layer (SSD, arXiv:2405.21060) in plain jax.numpy.

Eight simulated devices; bytes of Python's standard library as text. First the proof that no schedule changes the
gradient, then training through a pipeline of four stages.

python examples/state_space.py
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxfb

VOCAB, KERNEL = 256, 4


def init(key, *, width=64, heads=4, state=16, num_layers=4):
    """Parameters; a head is 2 * width / heads wide, its state is [that, state]."""
    keys, inner = iter(jax.random.split(key, 8)), 2 * width
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])  # noqa: E731
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (VOCAB, width)),
        "norm": jnp.ones(width),
        "layers": {  # stacked: the first dim is the layer's
            "norm": jnp.ones((num_layers, width)),
            "into": normal(num_layers, width, 2 * inner + 2 * state + heads),
            "convolve": normal(num_layers, KERNEL, inner + 2 * state),
            "log_rate": jnp.log(jnp.linspace(1.0, 8.0, heads)) + jnp.zeros((num_layers, 1)),
            "step_bias": jnp.linspace(-4.0, -1.0, heads) + jnp.zeros((num_layers, 1)),
            "skip": jnp.ones((num_layers, heads)),
            "gate_norm": jnp.ones((num_layers, inner)),
            "out": normal(num_layers, inner, width) / np.sqrt(2 * num_layers),
        },
    }


def embed(outer, microbatch, rng):
    return outer["embed"][microbatch["tokens"]]


def layer(p, hidden, microbatch, rng):
    """One Mamba-2 block: what goes in, how fast it fades and what is read are functions of the token."""
    inner, heads = p["gate_norm"].shape[0], p["skip"].shape[0]
    state = (p["convolve"].shape[1] - inner) // 2
    gate, mixed, step = jnp.split(
        normalise(hidden, p["norm"]) @ p["into"], [inner, 2 * inner + 2 * state], axis=-1
    )
    x, write, read = jnp.split(jax.nn.silu(convolve(mixed, p["convolve"])), [inner, inner + state], axis=-1)
    x = x.reshape(*x.shape[:2], heads, -1)
    step = jax.nn.softplus(step + p["step_bias"])
    out = scan(x * step[..., None], -jnp.exp(p["log_rate"]) * step, write, read) + x * p["skip"][:, None]
    out = normalise(out.reshape(gate.shape) * jax.nn.silu(gate), p["gate_norm"])
    return hidden + out @ p["out"]


def head(outer, hidden, microbatch, rng):
    log_probs = jax.nn.log_softmax(normalise(hidden, outer["norm"]) @ outer["embed"].T)
    picked = jnp.take_along_axis(log_probs, microbatch["targets"][..., None], axis=-1)
    return jaxfb.LossOutput({"cross_entropy": jaxfb.Sum(-picked.sum(), picked.size)})


def scan(x, log_decay, write, read, chunk=16):
    """out[t] = read[t] . S[t], S[t] = exp(log_decay[t]) S[t-1] + x[t] write[t]^T; S[-1] = 0. In chunks, by matmuls.

    x: [R, T, H, P], log_decay: [R, T, H], write, read: [R, T, N]; returns [R, T, H, P]. Inside a chunk it is attention
    with decay for a mask; between chunks the states of all are found by one `associative_scan`.
    """
    chunk = min(chunk, x.shape[1])
    cut = lambda a: a.reshape(a.shape[0], -1, chunk, *a.shape[2:])  # noqa: E731
    x, log_decay, write, read = cut(x), cut(log_decay), cut(write), cut(read)  # [R, C, Q, ...]
    until = jnp.cumsum(log_decay, axis=2)
    between = until[:, :, :, None] - until[:, :, None]  # [R, C, Q, K, H], from k to q
    causal = jnp.tril(jnp.ones((chunk, chunk), bool))[..., None]
    mask = jnp.exp(jnp.where(causal, between, -jnp.inf))
    inside = jnp.einsum("rcqn,rckn,rcqkh,rckhp->rcqhp", read, write, mask, x)

    made = jnp.einsum("rckn,rckh,rckhp->rchpn", write, jnp.exp(until[:, :, -1:] - until), x)
    decay = jnp.exp(until[:, :, -1])[..., None, None]
    join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    after = jax.lax.associative_scan(join, (decay, made), axis=1)[1]
    before = jnp.pad(after[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0), (0, 0)])
    carried = jnp.einsum("rcqn,rchpn,rcqh->rcqhp", read, before, jnp.exp(until))
    return (inside + carried).reshape(x.shape[0], -1, *x.shape[3:])


def convolve(x, kernel):
    """Causal, each channel alone: [R, T, W] with [KERNEL, W]."""
    padded = jnp.pad(x, [(0, 0), (KERNEL - 1, 0), (0, 0)])
    return sum(padded[:, i : i + x.shape[1]] * kernel[i] for i in range(KERNEL))


def normalise(x, scale):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


model = jaxfb.Pipelined(embed, layer, head)


def text(num_bytes: int) -> np.ndarray:
    """The standard library's own source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[:num_bytes], np.uint8)


def windows(source: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> dict:
    start = rng.integers(0, len(source) - length, rows)[:, None] + np.arange(length + 1)
    taken = source[start].astype(np.int32)
    return {"tokens": taken[:, :-1], "targets": taken[:, 1:]}


def main(updates=50):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    source, rng = text(2_000_000), np.random.default_rng(0)

    small = init(jax.random.key(0), width=16, heads=2, state=4)
    found = jaxfb.check_equivalence(model, small, windows(source, 8, 32, rng), [{"pipe": 2}])
    print(found)
    found.raise_if_above()

    plan = jaxfb.BatchPlan(rows=32, rows_per_microbatch=4, data_parallel=2)
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=5e-3)
    mesh = jaxfb.make_mesh(pipe=4, data=2)
    train_step = jaxfb.make_train_step(model, optimizer, mesh, plan, schedule="1f1b", max_grad_norm=1.0)
    state, losses = train_step.init(init), []
    for step in range(1, updates + 1):
        state, metrics = train_step(state, windows(source, plan.rows, 32, rng))
        losses.append(float(metrics.loss))  # simulated devices want to be waited for at each step
        if step == 1 or step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f} nats a byte")
    fell = losses[0] - np.mean(losses[-5:])
    print(f"fell by {fell:.1f}")


if __name__ == "__main__":
    main()
