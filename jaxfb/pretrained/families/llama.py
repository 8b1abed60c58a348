"""Llama, and what was published as one."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, refuse


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, attention_bias=False, mlp_bias=False)
    return {}


LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    models="Llama 2, 3, 3.1-3.3 (llama3 rope scaling), SmolLM",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
)
