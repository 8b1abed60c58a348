"""Mistral: Llama, the first version with a sliding window."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, refuse


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, sliding_window=None)
    return {}


MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    models="Mistral without a sliding window (v0.2 and later)",
    tested="transformers: logits",
    sizes=_sizes,
)
