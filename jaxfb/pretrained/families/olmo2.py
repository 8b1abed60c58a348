"""OLMo 2: norms after attention and MLP in place of before them, and over all heads of queries and keys together."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, attention_bias_keys, bias_sizes
from jaxfb.pretrained.tensors import DENSE

_NAMES = {
    **DENSE,
    "attention_out_norm.scale": "post_attention_layernorm.weight",
    "mlp_out_norm.scale": "post_feedforward_layernorm.weight",
}


def _sizes(values: Values) -> dict[str, Any]:
    biases = bias_sizes(values)
    variant = {**biases["variant"], "norms": "post", "qk_norm_over": "token"}
    return {**biases, "qk_norm": True, "variant": variant}


OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    models="OLMo 2",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=attention_bias_keys,
    layer_names=_NAMES,
)
