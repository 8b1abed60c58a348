"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, only_full_attention


def _sizes(values: Values) -> dict[str, Any]:
    only_full_attention(values)
    return {"qkv_bias": True}


QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
)
