"""Llama, and what was published as one."""

from __future__ import annotations

from jaxfb.pretrained.family import Architecture, bias_keys, bias_sizes

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    models="Llama 2, 3, 3.1-3.3 (llama3 rope scaling), SmolLM 1 and 2",
    tested="transformers: logits, losses, gradients",
    sizes=bias_sizes,
    keys=bias_keys,
    divided_width=True,
)
