"""Builds the toy as a module of Flax (Linen, NNX) or Equinox, the built-in transformer, and a model of exact sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.toy_models import toys
from jaxfb.checking.toy_models.outputs import output
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.refusal import Refused
from jaxfb.types import LossFn, Pipelined, Sum

PyTree = Any
HEADS = 2


def linen(case: Case) -> tuple[LossFn, PyTree]:
    """Returns the loss function and the parameters of a Linen module."""
    from flax import linen as nn

    class Toy(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            hidden = nn.Embed(toys.VOCAB, toys.WIDTH)(tokens)
            for _ in range(case.num_layers):
                hidden = nn.LayerNorm()(hidden + jnp.tanh(nn.Dense(toys.WIDTH)(hidden)))
            return nn.Dense(toys.VOCAB)(hidden), hidden

    module = Toy()
    params = module.init(jax.random.key(case.data_seed), jnp.zeros((1, case.length), jnp.int32))
    return _loss(case, module.apply), cast(case, params)


def nnx(case: Case) -> tuple[LossFn, PyTree]:
    """Returns the loss function and the parameters of an NNX module, an `nnx.State`."""
    from flax import nnx

    class Toy(nnx.Module):
        def __init__(self, rngs):
            # not nnx.Embed, which computes in the dtype that its table was made in
            self.embed = nnx.Param(jax.random.normal(rngs.params(), (toys.VOCAB, toys.WIDTH)))
            self.layers = nnx.List(
                [nnx.Linear(toys.WIDTH, toys.WIDTH, rngs=rngs) for _ in range(case.num_layers)]
            )
            self.head = nnx.Linear(toys.WIDTH, toys.VOCAB, rngs=rngs)

        def __call__(self, tokens):
            hidden = self.embed[...][tokens]
            for layer in self.layers:
                hidden = hidden + jnp.tanh(layer(hidden))
            return self.head(hidden), hidden

    graph, params = nnx.split(Toy(nnx.Rngs(case.data_seed)))
    return _loss(case, lambda params, tokens: nnx.merge(graph, params)(tokens)), cast(case, params)


def equinox(case: Case) -> tuple[LossFn, PyTree]:
    """Returns the loss function and the parameters of an Equinox module: its float arrays, None for anything else."""
    try:
        import equinox as eqx
    except ModuleNotFoundError:
        raise Refused("a case with an Equinox module needs equinox, which is not installed") from None

    class Toy(eqx.Module):
        embed: jax.Array
        layers: list
        head: eqx.nn.Linear
        activation: Any

        def __init__(self, key):
            keys = jax.random.split(key, case.num_layers + 2)
            self.embed = jax.random.normal(keys[0], (toys.VOCAB, toys.WIDTH))
            self.layers = [eqx.nn.Linear(toys.WIDTH, toys.WIDTH, key=k) for k in keys[2:]]
            self.head = eqx.nn.Linear(toys.WIDTH, toys.VOCAB, key=keys[1])
            self.activation = jnp.tanh

        def __call__(self, tokens):
            each = lambda f: jax.vmap(jax.vmap(f))  # noqa: E731
            hidden = self.embed[tokens]
            for layer in self.layers:
                hidden = hidden + self.activation(each(layer)(hidden))
            return each(self.head)(hidden), hidden

    params, static = eqx.partition(Toy(jax.random.key(case.data_seed)), eqx.is_inexact_array)
    return _loss(case, lambda params, tokens: eqx.combine(params, static)(tokens)), cast(case, params)


def built_in(case: Case) -> tuple[Pipelined, PyTree]:
    """Returns the built-in transformer, with experts in "moe", and its parameters."""
    experts = {"num_experts": 4, "expert_mlp_size": 8, "router_z_coefficient": 0.1}
    vocab_size = toys.VOCAB * (4 if case.large_tables else 1)
    config = TransformerConfig(
        vocab_size=vocab_size, num_layers=case.num_layers, hidden_size=8, mlp_size=8, num_heads=HEADS, head_size=4,
        num_kv_heads=HEADS, tied_embeddings=case.tied, dropout=toys.RATE if case.dropout else 0.0, loss_chunk=16,
        attention="xla", context_attention=case.attention or "ring", **(experts if case.model == "moe" else {}),
    )  # fmt: skip
    return transformer(config), cast(case, init_params(config, jax.random.key(case.data_seed)))


def built_in_batch(case: Case) -> dict[str, np.ndarray]:
    """Returns rows of tokens with two documents each, and which of them count."""
    toy = toys.batch_of(case)
    segments = np.where(np.arange(case.length) < case.length // 2, 1, 2) * np.ones_like(toy["tokens"])
    targets = np.random.default_rng(case.data_seed + 2).integers(0, toys.VOCAB, toy["tokens"].shape)
    return {
        "tokens": toy["tokens"],
        "targets": targets.astype(np.int32),
        "loss_mask": toy["mask"],
        "segments": segments.astype(np.int32),
    }


def sums(case: Case) -> tuple[Pipelined, PyTree]:
    """Returns a model whose gradients are sums of the rows' integers: exact in float32, not in 16 bits."""

    def embed(outer, microbatch, rng):
        return outer["w"] * microbatch["x"].astype(outer["w"].dtype)

    def layer(weights, hidden, microbatch, rng):
        return hidden + weights["w"] * microbatch["x"].astype(hidden.dtype)

    def head(outer, hidden, microbatch, rng):
        return Sum(hidden.astype(jnp.float32).sum(), None)

    params = {"w": np.full(toys.WIDTH, 0.5), "layers": {"w": np.full((case.num_layers, toys.WIDTH), 0.25)}}
    return Pipelined(embed, layer, head), cast(case, params)


def sums_batch(case: Case) -> dict[str, np.ndarray]:
    """Returns rows of integers whose sum over a microbatch has 8 bits, and whose sum over all has more."""
    rng = np.random.default_rng(case.data_seed)
    return {"x": rng.integers(0, 256 // case.rows_per_microbatch, (case.rows, toys.WIDTH)).astype(np.float32)}


def _loss(case: Case, apply) -> LossFn:
    """Makes a loss function of `apply`, (params, tokens) -> (logits, hidden)."""

    def loss(params, microbatch, rng):
        logits, hidden = apply(params, microbatch["tokens"])
        return output(case, logits, hidden, microbatch, jnp.ones(3, logits.dtype))

    return loss


def cast(case: Case, tree: PyTree) -> PyTree:
    """Returns numpy arrays, those of floats in the dtype of the case's parameters."""

    def one(leaf):
        leaf = np.asarray(leaf)
        return leaf.astype(jnp.dtype(case.param_dtype)) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(one, tree)
