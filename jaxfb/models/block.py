"""A layer of the transformer as a Flax module, and modules rebuilt from their dicts of arrays.

Shapes: R = rows, T = tokens of a row, D = hidden_size, E = num_experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxfb.models import lora
from jaxfb.models.adapted import lora_of
from jaxfb.models.attention import Attend, Attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent_attention import LatentAttention
from jaxfb.models.layers import RMSNorm, SwiGLU, dropout
from jaxfb.models.moe import MoE
from jaxfb.parallel.tensor import residual_stream
from jaxfb.types import LossOutput

whole = partial(residual_stream, sequence_parallel=False)


class Read(NamedTuple):
    """Holds the inputs of layers besides hidden states, for the rows that this device works on."""

    positions: jax.Array
    segments: jax.Array | None
    counted: jax.Array | None
    keys: jax.Array | None

    def of_layer(self, number: jax.Array | int) -> Read:
        """Returns the same with row keys folded with a number."""
        if self.keys is None:
            return self
        return self._replace(keys=jax.vmap(jax.random.fold_in, (0, None))(self.keys, number))


class Block(nnx.Module):
    """A layer: attention, and an MLP or experts, with norms before them, after them or both. [R, T, D] -> the same."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norms = config.variant.norms
        if self.norms != "post":
            self.attention_norm = RMSNorm(config.hidden_size, config)
            self.mlp_norm = RMSNorm(config.hidden_size, config)
        if self.norms != "pre":
            self.attention_out_norm = RMSNorm(config.hidden_size, config)
            self.mlp_out_norm = RMSNorm(config.hidden_size, config)
        self.attention = (LatentAttention if config.latent else Attention)(config, rngs=rngs)
        if config.num_experts:
            self.moe = MoE(config, rngs=rngs)
        else:
            self.mlp = SwiGLU(config, rngs=rngs)
        self.has_experts, self.dropout = bool(config.num_experts), config.dropout
        self.sequence_parallel = config.sequence_parallel

    def __call__(
        self, x_RTD: jax.Array, positions_RT: jax.Array, attend: Attend, keys: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        return self.with_router(x_RTD, positions_RT, attend, keys)[:2]

    def with_router(
        self,
        x_RTD: jax.Array,
        positions_RT: jax.Array,
        attend: Attend,
        keys: jax.Array | None = None,
        counted_RT: jax.Array | None = None,
        load_E: jax.Array | None = None,
        segments_RT: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, LossOutput]:
        """Returns (hidden, what `attend` kept, the router's terms of the loss and metrics, of tokens where
        `counted_RT`).
        """
        x_RTD, kept = self.attended(x_RTD, positions_RT, attend, keys)
        x_RTD, out, _ = self.transformed(x_RTD, keys, counted_RT, load_E, segments_RT=segments_RT)
        return x_RTD, kept, out

    def attended(
        self, x_RTD: jax.Array, positions_RT: jax.Array, attend: Attend, keys: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns (hidden after attention, what `attend` kept): the first half of a layer."""
        with jax.named_scope("attention"):
            read = x_RTD if self.norms == "post" else self.attention_norm(x_RTD)
            mixed, kept = self.attention(whole(read), positions_RT, attend)
            added = mixed if self.norms == "pre" else self.attention_out_norm(mixed)
            return x_RTD + dropout(added, self.dropout, keys, site=0), kept

    def transformed(
        self,
        x_RTD: jax.Array,
        keys: jax.Array | None = None,
        counted_RT: jax.Array | None = None,
        load_E: jax.Array | None = None,
        beside: Any = (),
        segments_RT: jax.Array | None = None,
    ) -> tuple[jax.Array, LossOutput, Any]:
        """Returns (hidden after MLP or experts, the router's terms and metrics, `beside`): the second half of a layer.

        beside: arrays to be computed while the first rows are sent to the experts.
        segments_RT: which sequence of its row a token is of, each balanced by itself.
        """
        out = LossOutput({})
        with jax.named_scope("mlp"):
            read = whole(x_RTD if self.norms == "post" else self.mlp_norm(x_RTD))
            if self.has_experts:
                output, out, beside = self.moe(read, counted_RT, load_E, beside, segments_RT)
            else:
                output = self.mlp(read)
            added = output if self.norms == "pre" else self.mlp_out_norm(output)
            x_RTD = x_RTD + dropout(added, self.dropout, keys, site=1)
        return residual_stream(x_RTD, self.sequence_parallel), out, beside


def init_module(module: Callable[..., nnx.Module], config: TransformerConfig) -> Callable[[jax.Array], dict]:
    """Returns a function of a PRNG key that draws the module's dict of arrays."""
    return lambda key: nnx.to_pure_dict(nnx.state(module(config, rngs=nnx.Rngs(key))))


def rebuilder(module: Callable[..., nnx.Module], config: TransformerConfig) -> Callable[..., Any]:
    """Returns a function from a module's dict of arrays to the module.

    Arrays in the dict that are not the module's own are left out, but for those of adapters where the config has some.
    A second argument is the keys of the rows, which the adapters' dropout draws from.
    """
    (graph, own), adapters = _structure(module, config), lora_of(config)

    def rebuild(params: Mapping, keys: jax.Array | None = None) -> Any:
        module = nnx.merge(graph, _own(params, own))
        if adapters is not None:
            lora.attach(module, params, adapters, keys)
        return module

    return rebuild


@lru_cache(maxsize=128)
def _structure(module: Callable[..., nnx.Module], config: TransformerConfig) -> tuple[nnx.GraphDef, dict]:
    """Returns (a module without its arrays, their shapes), found without computing any; once for equal configs."""
    graph, state = nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


def _own(params: Mapping, like: Mapping) -> dict:
    """Returns the arrays of `params` that `like` has too."""
    return {
        name: _own(params[name], value) if isinstance(value, Mapping) else params[name]
        for name, value in like.items()
    }
