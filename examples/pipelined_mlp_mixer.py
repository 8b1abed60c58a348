"""Not a transformer: an MLP-Mixer over image patches in plain jax.numpy, under a schedule written by hand.

Two stages on two of eight simulated devices' replicas, three microbatches. The task: which way do the stripes run?

python examples/pipelined_mlp_mixer.py
"""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxfb  # noqa: E402

SIDE, PATCH, WIDTH, LAYERS, CLASSES = 16, 4, 32, 4, 4
PATCHES = (SIDE // PATCH) ** 2


def init(key):
    keys = iter(jax.random.split(key, 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])  # noqa: E731
    return {
        "patches": normal(PATCH * PATCH, WIDTH),
        "classes": normal(WIDTH, CLASSES),
        "layers": {  # stacked: the first dim is the layer's
            "mix": [normal(LAYERS, PATCHES, 2 * PATCHES), normal(LAYERS, 2 * PATCHES, PATCHES)],
            "channels": [normal(LAYERS, WIDTH, 2 * WIDTH), normal(LAYERS, 2 * WIDTH, WIDTH)],
        },
    }


def embed(outer, microbatch, rng):
    rows, n = microbatch["image"].shape[0], SIDE // PATCH
    cut = microbatch["image"].reshape(rows, n, PATCH, n, PATCH).swapaxes(2, 3)
    return cut.reshape(rows, PATCHES, PATCH * PATCH) @ outer["patches"]


def layer(p, hidden, microbatch, rng):
    mixed = jax.nn.gelu(normalise(hidden).swapaxes(1, 2) @ p["mix"][0]) @ p["mix"][1]
    hidden = hidden + mixed.swapaxes(1, 2)
    return hidden + jax.nn.gelu(normalise(hidden) @ p["channels"][0]) @ p["channels"][1]


def head(outer, hidden, microbatch, rng):
    logits = normalise(hidden).mean(1) @ outer["classes"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["label"])
    right = (logits.argmax(-1) == microbatch["label"]).sum()
    return jaxfb.LossOutput(
        {"cross_entropy": jaxfb.Sum(loss.sum(), loss.size)}, {"right": jaxfb.Sum(right, loss.size)}
    )


def normalise(x):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def stripes(rng: np.random.Generator, rows: int) -> dict:
    label = rng.integers(0, CLASSES, rows)
    angle, phase = label * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, rows)
    y, x = np.mgrid[:SIDE, :SIDE]
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    image = np.sin(1.2 * along + phase[:, None, None]) + rng.normal(0, 1.0, (rows, SIDE, SIDE))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


# A table of one's own; what is wrong in one is refused with the cell marked. `jaxfb schedule --table` draws it.
schedule = jaxfb.schedules.Schedule.from_text(
    """
    device 0  F0.0  F1.0       F2.0       B0.0       B1.0  B2.0
    device 1  .     F0.0+B0.0  F1.0+B1.0  F2.0+B2.0  .     .
    """,
    name="by hand",
)
print(schedule.render())
print(schedule.summary())

model = jaxfb.Pipelined(embed, layer, head)
plan = jaxfb.BatchPlan(rows=48, rows_per_microbatch=4, data_parallel=4)
optimizer = jaxfb.make_optimizer("adamw", learning_rate=2e-3)
mesh = jaxfb.make_mesh(pipe=2, data=4)
train_step = jaxfb.make_train_step(model, optimizer, mesh, plan, schedule=schedule, max_grad_norm=1.0)

state = train_step.init(init)
rng = np.random.default_rng(0)
for step in range(1, 81):
    state, metrics = train_step(state, stripes(rng, plan.rows))
    right = float(metrics.metrics["right"])  # simulated devices want to be waited for at each step
    if step % 20 == 0:
        print(f"step {step}: loss {metrics.loss:.3f}, right {right:.3f}")

# The same engine without the backward, for rows never seen: loss and metrics of the whole batch.
evaluate = jaxfb.get_forward_backward_func(mesh, "interleaved", num_chunks=2)
test = jaxfb.BatchPlan("eval", rows=512, rows_per_microbatch=32, data_parallel=4)
out = evaluate(model, state.params, stripes(rng, test.rows), test, forward_only=True)
print(f"unseen: loss {out.loss:.3f}, right {float(out.metrics['right']):.3f}")
