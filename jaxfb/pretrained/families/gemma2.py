"""Gemma 2: every other layer has a window; norms before and after, soft caps, a scale of its own for attention."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.families.gemma import gemma_variant
from jaxfb.pretrained.family import Architecture, Values, bias_sizes, refuse
from jaxfb.pretrained.layer_types import (
    FULL,
    SLIDING,
    stack_sizes,
    type_keys,
    types_of,
    windows_of,
)
from jaxfb.pretrained.tensors import DENSE

NAMES = {
    **DENSE,
    "attention_out_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "mlp_out_norm.scale": "post_feedforward_layernorm.weight",
}
# neither model reads hidden_act, only hidden_activation
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "gelu": "gelu"}


def later_gemma_sizes(values: Values) -> dict[str, Any]:
    """Returns what Gemma 2 and 3 have in common."""
    refuse(values, hidden_activation="gelu_pytorch_tanh")
    if values.flag("use_bidirectional_attention"):
        refuse(values, use_bidirectional_attention=False)
    biases = bias_sizes(values)
    return {
        **biases,
        "head_size": values.integer_or_none("head_dim", 256),
        "tied_embeddings": values.flag("tie_word_embeddings", True),
        "variant": {
            **biases["variant"],
            **gemma_variant(values),
            "activation": "gelu_tanh",
            "norms": "both",
            "attention_scale": values.number("query_pre_attn_scalar", 256, above=0) ** -0.5,
        },
    }


def later_gemma_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that both have; a scale of attention may differ in the last bit when it is read again."""
    scale = sizes.variant.attention_scale or sizes.head_size**-0.5
    scalar = scale**-2
    return {
        "attention_bias": sizes.variant.output_bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar,
        **type_keys(sizes),
    }


def _sizes(values: Values) -> dict[str, Any]:
    found = later_gemma_sizes(values)
    window, number = values.integer_or_none("sliding_window", 4096), values.integer("num_hidden_layers")
    types = types_of(values, [FULL if layer % 2 else SLIDING for layer in range(number)])
    return {
        **found,
        **stack_sizes([LayerKind(window=one) for one in windows_of(types, window)]),
        "logit_softcap": values.number_or_none("final_logit_softcapping", 30.0),
        "variant": {
            **found["variant"],
            "attention_softcap": values.number_or_none("attn_logit_softcapping", 50.0),
        },
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    return {
        **later_gemma_keys(sizes),
        "final_logit_softcapping": sizes.logit_softcap,
        "attn_logit_softcapping": sizes.variant.attention_softcap,
    }


GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    models="Gemma 2",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    activations=ACTIVATIONS,
    layer_names=NAMES,
    divided_width=True,
)
