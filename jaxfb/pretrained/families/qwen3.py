"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values, bias_sizes
from jaxfb.pretrained.layer_types import qwen_window_keys, qwen_windows


def _sizes(values: Values) -> dict[str, Any]:
    return {**bias_sizes(values), "qk_norm": True, **qwen_windows(values)}


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    return {"attention_bias": sizes.variant.output_bias, **qwen_window_keys(sizes)}


QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    models="Qwen3",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
)
