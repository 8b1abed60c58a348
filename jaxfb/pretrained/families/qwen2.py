"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values
from jaxfb.pretrained.layer_types import qwen_window_keys, qwen_windows


def _sizes(values: Values) -> dict[str, Any]:
    return {"qkv_bias": True, **qwen_windows(values)}


QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    tested="transformers: logits, losses, gradients",
    keys=qwen_window_keys,
    sizes=_sizes,
)
