"""A tiny model with everything that can go wrong under a split: ragged masks, two weights, tied weights, dropout."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import jaxfb
from jaxfb.types import Last, LossOutput, Max, Min, Pipelined, Sum

ROWS, SEQ, WIDTH, VOCAB, LAYERS = 16, 5, 8, 12, 4


def params(seed=0, layers=LAYERS, dtype=np.float64, tied=True):
    """float64 parameters; one leaf that no axis divides."""
    rng = np.random.default_rng(seed)
    tree = {
        "embed": rng.normal(size=(VOCAB, WIDTH)),
        "layers": {
            "w": rng.normal(size=(layers, WIDTH, WIDTH)) * 0.3,
            "b": rng.normal(size=(layers, WIDTH)) * 0.1,
        },
        "gain": np.ones(3),
    }
    if not tied:
        tree["head"] = rng.normal(size=(WIDTH, VOCAB))
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def batch(seed=0, rows=ROWS):
    """Tokens with ragged masks; two rows count nothing."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, SEQ)) > 0.4).astype(np.float64)
    mask[3 % rows] = mask[5 % rows] = 0
    return {"tokens": rng.integers(0, VOCAB, (rows, SEQ)), "mask": mask, "row_weight": rng.random(rows)}


def dropped(x, keys):
    """x with a fifth of it dropped, drawn a row at a time; keys None: x."""
    if keys is None:
        return x
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
    return jnp.where(keep, x / 0.8, 0)


def embed(outer, microbatch, rng):
    return outer["embed"][microbatch["tokens"]]


def layer(weights, hidden, microbatch, rng):
    hidden = dropped(hidden + jnp.tanh(hidden @ weights["w"] + weights["b"]), rng)
    balance = 0.1 * (hidden**2).mean((1, 2)).sum()
    return hidden, {"balance": Sum(balance, float(hidden.shape[0]))}


def head(outer, hidden, microbatch, rng):
    logits = hidden @ (outer["head"] if "head" in outer else outer["embed"].T)
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, microbatch["tokens"][..., None], -1)[..., 0]
    mask = microbatch["mask"]
    per_token = jnp.where(mask > 0, -picked, 0)
    return LossOutput(
        terms={
            "cross_entropy": Sum(per_token.sum(), mask.sum()),
            "rows": Sum(
                1e-2 * ((hidden**2).sum((1, 2)) * microbatch["row_weight"]).sum() * outer["gain"].sum(),
                microbatch["row_weight"].sum(),
            ),
        },
        metrics={
            "largest": Max(per_token.max()),
            "smallest": Min(picked.min()),
            "last": Last(picked[-1, -1]),
            "hard": Sum((per_token > 2).sum(), mask.sum()),
        },
        outputs={"row_loss": per_token.sum(1), "log_probs": picked},
    )


model = Pipelined(embed, layer, head)


def whole_batch(params, batch, rng=None, normalize="global", parts=1):
    """(loss, terms) of all rows at once on one device, written out: no scan, no jaxfb but its types.

    parts: for normalize="microbatch", the number of contiguous equal parts that are averaged.
    """
    rows = batch["tokens"].shape[0]
    keys = None if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(rows))
    if normalize == "microbatch":
        cut = lambda leaf, part: leaf.reshape(parts, -1, *leaf.shape[1:])[part]  # noqa: E731
        each = [
            _terms(params, {k: cut(v, p) for k, v in batch.items()}, None if keys is None else cut(keys, p))
            for p in range(parts)
        ]
        return sum(term.value for out in each for term in out.values()) / parts, each
    out = _terms(params, batch, keys)
    return sum(term.total if normalize == "none" else term.value for term in out.values()), out


@cache
def gradient(layers=LAYERS, seed=None):
    """(loss, gradient) of `batch()` by `whole_batch`, in float64; seed: of the dropout's key, None without."""
    key = None if seed is None else jax.random.key(seed)
    run = jax.jit(jax.value_and_grad(lambda tree: whole_batch(tree, batch(), key)[0]))
    return jax.device_get(run(params(layers=layers)))


def _terms(params, batch, keys):
    hidden, balance = embed(params, batch, keys), Sum(0.0, 0.0)
    for index in range(params["layers"]["w"].shape[0]):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        row_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        hidden, extra = layer(weights, hidden, batch, row_keys)
        balance = balance + extra["balance"]
    return {**head(params, hidden, batch, keys).terms, "balance": balance}


def on_mesh(mesh, rng, layers=LAYERS, num_microbatches=2, schedule=None, **options):
    """The result of a call of the engine on a mesh of these sizes."""
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), schedule, **options)
    return fb(model, params(layers=layers), batch(), plan, rng)
