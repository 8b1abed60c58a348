"""The built-in transformer on a whole batch without an engine: what the engine's results are compared with."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb import LossOutput
from jaxfb.losses.vocabulary.logits import capped
from jaxfb.models.transformer import transformer
from jaxfb.types import outer_params


def apply(model, params, microbatch, rng=None):
    """The output for one microbatch, which is then the whole batch."""
    hidden, layers = _run_layers(model, params, microbatch, rng)
    if model.counted is not None and model.counted.before is not None:
        params = model.counted.before(params, layers.metrics)
        hidden, layers = _run_layers(model, params, microbatch, rng)
    out = model.head(outer_params(params), hidden, microbatch, rng)
    if not isinstance(out, LossOutput):
        return out
    return replace(out, terms=out.terms | layers.terms, metrics=out.metrics | layers.metrics)


def logits(config, params, microbatch):
    """All logits, float32[R, T, V] (float64 for float64 params)."""
    wide = jnp.promote_types(params["norm"]["scale"].dtype, jnp.float32)

    def project(hidden, kernel, _):
        return capped(jnp.matmul(hidden, kernel, preferred_element_type=wide), config.logit_softcap)

    return apply(transformer(config, loss=project), params, microbatch)


def hidden_states(model, params, microbatch, rng=None):
    """What the last layer gives, float[R, T, D]."""
    return _run_layers(model, params, microbatch, rng)[0]


def _run_layers(model, params, microbatch, rng):
    """hidden_states, the layers' own terms added over layers, and their metrics of each."""

    def step(hidden, indexed):
        index, layer_params = indexed
        keys = None if rng is None else jax.vmap(jax.random.fold_in, (0, None))(rng, index)
        out = model.layer(layer_params, hidden, microbatch, keys)
        hidden, said = out if isinstance(out, tuple) else (out, {})
        return hidden, said if isinstance(said, LossOutput) else LossOutput(said)

    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    hidden = model.embed(outer_params(params), microbatch, rng)
    hidden, out = lax.scan(step, hidden, (jnp.arange(num_layers), params["layers"]))
    return hidden, LossOutput(jax.tree.map(lambda per_layer: per_layer.sum(0), out.terms), out.metrics)


def ragged_batch(lengths, length):
    """Rows of these numbers of tokens with ragged masks, of which row 4 counts nothing; what is beyond a row is not
    inert.
    """
    rng, rows = np.random.default_rng(0), len(lengths)
    real = np.arange(length) < lengths[:, None]
    tokens = rng.integers(0, 16, (rows, length + 1))
    mask = (real & (rng.random((rows, length)) < 0.7)).astype(np.float64)
    mask[4] = 0
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": mask,
        "segments": real.astype(int),
    }


def value_and_grad(model, params, batch):
    """((cross entropy, output), gradients) of the whole batch at once."""

    @jax.jit
    def both(params, batch):
        def total(tree):
            out = apply(model, tree, batch)
            return out.terms["cross_entropy"].value, out

        return jax.value_and_grad(total, has_aux=True)(params)

    return both(params, jax.tree.map(jnp.asarray, batch))
