"""Your own Flax model in your own loop: jaxfb does the microbatches, the mesh and the one update.

python examples/own_flax_model.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxfb


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(2, 64, rngs=rngs)
        self.out = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


# Split the model once and put it together inside the loss. Only nnx.Param is trained: with BatchNorm or Dropout in the
# model, `graph, params, rest = nnx.split(model, nnx.Param, ...)` and `nnx.merge(graph, params, rest, copy=True)`. In
# training BatchNorm then normalizes by the rows of one microbatch, and its running statistics stay as they are. Dropout
# is called with keys of `rng`, row by row: `jax.vmap(lambda x, key: model(x, rngs=nnx.Rngs(key)))(x, rng)`, where the
# model hands rngs on to `nnx.Dropout(rate)`. Keys that the model holds would draw the same in every update.
graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)


def loss_fn(params, microbatch, rng):
    logits = nnx.merge(graph, params)(microbatch["point"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["label"])
    right = (logits.argmax(-1) == microbatch["label"]).sum()
    return jaxfb.LossOutput(
        terms={"cross_entropy": jaxfb.Sum(loss.sum(), loss.size)},
        metrics={"accuracy": jaxfb.Sum(right, loss.size)},
    )


def two_rings(rng: np.random.Generator, rows: int) -> dict:
    label = rng.integers(0, 2, rows)
    angle, radius = rng.uniform(0, 2 * np.pi, rows), 1 + label + rng.normal(0, 0.15, rows)
    point = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return {"point": point.astype(np.float32), "label": label.astype(np.int32)}


mesh = jaxfb.make_mesh(data=-1)  # every device there is
replicas = mesh.shape["data"]
plan = jaxfb.BatchPlan(rows=64 * replicas, rows_per_microbatch=16, data_parallel=replicas)  # 4 microbatches
optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-2)  # any optax transformation works here
train_step = jaxfb.make_train_step(loss_fn, optimizer, mesh, plan, max_grad_norm=1.0)

train_state = train_step.init(params)
rng = np.random.default_rng(0)
for step in range(100):
    train_state, metrics = train_step(train_state, two_rings(rng, plan.rows))
    if step % 20 == 19:  # reading a number waits for the device: not at every step
        print(f"step {step + 1}: loss {metrics.loss:.3f}, accuracy {metrics.metrics['accuracy']:.3f}")

test = two_rings(rng, 1000)
guess = nnx.merge(graph, jax.device_get(train_state.params))(jnp.asarray(test["point"])).argmax(-1)
print(f"test accuracy {np.mean(guess == test['label']):.3f}")
