"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values, bias_sizes, only_full_attention


def qwen3_sizes(values: Values) -> dict[str, Any]:
    """Returns what both the dense models and those with experts have."""
    only_full_attention(values)
    return {**bias_sizes(values), "qk_norm": True}


def qwen3_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of both."""
    return {"attention_bias": sizes.variant.output_bias}


QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    models="Qwen3",
    tested="transformers: logits, losses, gradients",
    sizes=qwen3_sizes,
    keys=qwen3_keys,
)
