"""Gemma, the first: scaled embeddings, norms that multiply by 1 + their scale, a gate of tanh-approximated GELU."""

from __future__ import annotations

from typing import Any

from jaxfb.pretrained.family import Architecture, Values, attention_bias_keys, bias_sizes, refuse


def gemma_variant(values: Values) -> dict[str, Any]:
    """Returns what all of Gemma's models have in common."""
    return {"norm_offset": True, "embedding_scale": values.integer("hidden_size") ** 0.5}


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, use_bidirectional_attention=None)
    if values.get("hidden_activation") is not None:  # of older files, whose hidden_act means nothing then
        refuse(values, hidden_activation="gelu_pytorch_tanh")
    biases = bias_sizes(values)
    tied = values.flag("tie_word_embeddings", True)
    return {**biases, "tied_embeddings": tied, "variant": {**biases["variant"], **gemma_variant(values)}}


GEMMA = Architecture(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    models="Gemma (the first)",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=attention_bias_keys,
    # transformers reads "gelu" of the first published files as the approximation, which it was trained with
    activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"},
)
