"""Describes an architecture: its config.json as sizes of the built-in transformer and back, and its tensors' names.

A family's file in `families/` makes one `Architecture`; `architectures.py` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.tensors import DENSE, OUTER_NAMES, Place
from jaxfb.pretrained.values import WHO, Values
from jaxfb.refusal import Refused, shown

MULTI_TOKEN = ("num_nextn_predict_layers", "num_mtp_layers")
"""The keys of how many layers behind the last predict further tokens; transformers' models do without them."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of Hugging Face's transformers.

    model_type, class_name: what its config.json calls it.
    models:      those that have it, for the table in the docs.
    tested:      what its numbers are compared with by the tests.
    sizes:       config.json -> the fields of `TransformerConfig` that differ from the Llama family's; those of its
                 `variant` as a dict.
    activations: the values of `hidden_act` -> our `variant.activation`.
    keys:        sizes -> the keys of config.json that differ from the Llama family's.
    layer_names: our path below one layer -> the tensor's name below "model.layers.N", or a `Place`.
    outer_names: our path of what is not a layer -> the tensor's name.
    default_theta: of rotary positions, where config.json has none.
    rope_by_type: whether `rope_parameters` may have one object for each type of layers, which `sizes` reads.
    rope_in_part: whether only a part of each head may turn, which `sizes` reads.
    divided_width: whether transformers loads it only where `hidden_size` is a multiple of `num_attention_heads`.
    """

    model_type: str
    class_name: str
    models: str
    tested: str
    sizes: Callable[[Values], dict[str, Any]] = _nothing
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    keys: Callable[[TransformerConfig], dict[str, Any]] = _nothing
    layer_names: Mapping[str, str | Place] = field(default_factory=lambda: DENSE)
    outer_names: Mapping[str, str] = field(default_factory=lambda: OUTER_NAMES)
    default_theta: float = 10_000.0
    rope_by_type: bool = False
    rope_in_part: bool = False
    divided_width: bool = False


def refuse(values: Mapping[str, Any], **supported: Any) -> None:
    """Refuses keys that have another value than the supported one."""
    for name, wanted in supported.items():
        if values.get(name, wanted) != wanted:
            raise Refused(f"{WHO} {name}={shown(values[name])} is not supported; only {name}={wanted!r} is")


def depths(values: Mapping[str, Any]) -> int:
    """Returns how many layers behind the last predict further tokens."""
    read = values if isinstance(values, Values) else Values(values)
    return max(read.integer_or_none(name, least=0) or 0 for name in MULTI_TOKEN)


def bias_sizes(values: Values) -> dict[str, Any]:
    """Returns the fields of `attention_bias`, on all four projections, and of `mlp_bias`."""
    attention, mlp = values.flag("attention_bias"), values.flag("mlp_bias")
    return {"qkv_bias": attention, "variant": {"output_bias": attention, "mlp_bias": mlp}}


def bias_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of biases."""
    return {"attention_bias": sizes.variant.output_bias, "mlp_bias": sizes.variant.mlp_bias}


def attention_bias_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the key of biases in attention alone, for architectures whose MLPs never have any."""
    return {"attention_bias": bias_keys(sizes)["attention_bias"]}


def experts(number: int, values: Values) -> dict[str, Any]:
    """Returns the fields of a mixture; its balance loss is that of all layers together, as transformers computes it."""
    coefficient = values.number("router_aux_loss_coef", 0.001, least=0)
    return {
        "num_experts": number,
        "experts_per_token": values.integer("num_experts_per_tok"),
        "balance_coefficient": 0.0,
        "batch_balance_coefficient": coefficient * values.flag("output_router_logits"),
        "batch_balance_layers": "together",
    }


def expert_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of a mixture."""
    return {"num_experts_per_tok": sizes.experts_per_token, "num_local_experts": sizes.num_experts}
