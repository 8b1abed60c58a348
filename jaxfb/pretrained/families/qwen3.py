"""Qwen3: Llama with a norm over each query and key head."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, only_full_attention, refuse


def qwen3_sizes(values: Values) -> dict[str, Any]:
    """Returns what both the dense models and those with experts have."""
    only_full_attention(values)
    refuse(values, attention_bias=False)
    return {"qk_norm": True}


QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    models="Qwen3",
    tested="transformers: logits, losses, gradients",
    sizes=qwen3_sizes,
)
