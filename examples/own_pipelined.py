"""A Flax transformer of your own through a pipeline: cut it by hand into embed, layer and head.

Eight simulated devices, four stages of two chunks on two replicas; first the proof that nothing changed, then training.
The task: the next token is the sum of the last two, modulo ten.

python examples/own_pipelined.py
"""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import jaxfb  # noqa: E402

VOCAB, WIDTH, LENGTH, LAYERS = 10, 48, 16, 8


class Outer(nnx.Module):
    """Whatever is not a layer: both ends of the model. The head reuses the embedding, which is all that tying takes."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 96, rngs=rngs), nnx.Linear(96, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def pure(module: type[nnx.Module]):
    """(init: key -> dict of arrays, apply: dict -> module)."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: module(nnx.Rngs(0))))
    init = lambda key: nnx.to_pure_dict(nnx.state(module(nnx.Rngs(key)), nnx.Param))  # noqa: E731
    rest = nnx.state(module(nnx.Rngs(0)), nnx.Not(nnx.Param))
    return init, lambda params: nnx.merge(graph, params, rest)


init_outer, outer_of = pure(Outer)
init_block, block_of = pure(Block)
outer_key, layers_key = jax.random.split(jax.random.key(0))
params = init_outer(outer_key)  # everything beside "layers", under any names
params["layers"] = jax.vmap(init_block)(jax.random.split(layers_key, LAYERS))  # every leaf [LAYERS, ...]


def embed(outer, microbatch, rng):
    model = outer_of(outer)
    return model.tokens(microbatch["tokens"]) + model.places(jnp.arange(LENGTH))


def layer(layer_params, hidden, microbatch, rng):
    return block_of(layer_params)(hidden, nnx.make_causal_mask(microbatch["tokens"]))


def head(outer, hidden, microbatch, rng):
    model = outer_of(outer)
    logits = model.tokens.attend(model.norm(hidden))[:, 1:-1]
    targets = microbatch["tokens"][:, 2:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets).sum()
    return jaxfb.LossOutput(
        terms={"cross_entropy": jaxfb.Sum(loss.sum(), loss.size)},
        metrics={"accuracy": jaxfb.Sum(right, loss.size)},
    )


def sums(rng: np.random.Generator, rows: int) -> dict:
    tokens = rng.integers(0, VOCAB, (rows, LENGTH))
    for place in range(2, LENGTH):
        tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % VOCAB
    return {"tokens": tokens.astype(np.int32)}


model = jaxfb.Pipelined(embed, layer, head)
rng = np.random.default_rng(0)
sizes = {"pipe": 4, "data": 2}
print(jaxfb.check_equivalence(model, params, sums(rng, 16), [sizes], ["interleaved"], rows_per_microbatch=2))

plan = jaxfb.BatchPlan(rows=64, rows_per_microbatch=4, data_parallel=2)  # 8 microbatches
print(jaxfb.schedules.make("interleaved", 4, plan.num_microbatches, num_chunks=2).summary())
optimizer = jaxfb.make_optimizer("adamw", learning_rate=2e-3)
train_step = jaxfb.make_train_step(
    model, optimizer, jaxfb.make_mesh(**sizes), plan, schedule="interleaved", num_chunks=2, max_grad_norm=1.0
)
state = train_step.init(params)
for step in range(1, 101):
    state, metrics = train_step(state, sums(rng, plan.rows))
    accuracy = float(metrics.metrics["accuracy"])  # simulated devices want to be waited for at each step
    if step % 20 == 0:
        print(f"step {step}: loss {metrics.loss:.3f}, accuracy {accuracy:.3f}")
