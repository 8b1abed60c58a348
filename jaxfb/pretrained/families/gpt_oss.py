"""gpt-oss: experts in every layer, biases everywhere, attention sinks, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.family import Architecture, Values, expert_keys, experts, refuse
from jaxfb.pretrained.layer_types import (
    FULL,
    SLIDING,
    stack_sizes,
    type_keys,
    types_of,
    windows_of,
)
from jaxfb.pretrained.tensors import ATTENTION, Every, Place

_NAMES = {
    **ATTENTION,
    "attention.sinks": "self_attn.sinks",
    "moe.router.kernel": "mlp.router.weight",
    "moe.router.logit_bias": "mlp.router.bias",
    "moe.experts.gate": Every("mlp.experts.gate_up_proj", turned=False, first=0),
    "moe.experts.up": Every("mlp.experts.gate_up_proj", turned=False, first=1),
    "moe.experts.down": Place("mlp.experts.down_proj", turned=False),
    "moe.experts.gate_bias": Every("mlp.experts.gate_up_proj_bias", turned=False, first=0),
    "moe.experts.up_bias": Every("mlp.experts.gate_up_proj_bias", turned=False, first=1),
    "moe.experts.down_bias": Place("mlp.experts.down_proj_bias", turned=False),
}


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0)
    values.integer_or_none("experts_per_token")  # what else num_experts_per_tok is called in the same file
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        raise KeyError(
            "rope_parameters"
        )  # without it transformers takes a YaRN scaling of its default config
    window, number = values.integer_or_none("sliding_window", 128), values.integer("num_hidden_layers")
    types = types_of(values, [FULL if layer % 2 else SLIDING for layer in range(number)])
    kinds = [LayerKind(window=one) for one in windows_of(types, window)]
    return {
        **experts(values.integer_or_none("num_local_experts") or values.integer("num_experts"), values),
        **stack_sizes(kinds, has_experts=True),
        "head_size": values.integer_or_none("head_dim", 64),
        "expert_mlp_size": values.integer("intermediate_size"),
        "qkv_bias": True,
        "variant": {
            "activation": "clamped_silu",
            "attention_sinks": True,
            "output_bias": True,
            "mlp_bias": True,
        },
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    return {
        **expert_keys(sizes),
        "intermediate_size": sizes.expert_mlp_size,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        **type_keys(sizes),
    }


GPT_OSS = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    models="gpt-oss (MXFP4 is read as bfloat16)",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    activations={"silu": "silu"},  # its own is part of the architecture
    layer_names=_NAMES,
    default_theta=150_000.0,
)
