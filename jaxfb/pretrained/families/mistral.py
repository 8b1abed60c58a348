"""Mistral: Llama, with a sliding window in the first version."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values


def _sizes(values: Values) -> dict[str, Any]:
    return {"window": values.integer_or_none("sliding_window", 4096)}


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    return {"sliding_window": sizes.window}


MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    models="Mistral, with and without a sliding window",
    tested="transformers: logits",
    sizes=_sizes,
    keys=_keys,
)
