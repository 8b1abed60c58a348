"""Mixtral: Mistral with experts, whose chosen ones' scores are divided by their sum."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values, expert_keys, experts
from jaxfb.pretrained.tensors import ATTENTION

_NAMES = {
    **ATTENTION,
    "moe.router.kernel": "block_sparse_moe.gate.weight",
    "moe.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "moe.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
    "moe.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
}


def _sizes(values: Values) -> dict[str, Any]:
    return {
        **experts(values.integer("num_local_experts"), values),
        "expert_mlp_size": values.integer("intermediate_size"),
        "window": values.integer_or_none("sliding_window"),
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    window = {"sliding_window": sizes.window} if sizes.window else {}
    return {**expert_keys(sizes), **window, "intermediate_size": sizes.expert_mlp_size}


MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    models="Mixtral",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    layer_names=_NAMES,
    default_theta=1_000_000.0,
)
