"""SmolLM3: Llama, where some layers have no rotary positions, and may have a sliding window."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.family import Architecture, Values, bias_keys, bias_sizes
from jaxfb.pretrained.layer_types import (
    SLIDING,
    layers_in,
    stack_sizes,
    types_in,
    types_of,
    used_window,
    window_in,
    windows_of,
)
from jaxfb.pretrained.values import WHO
from jaxfb.refusal import Refused, refuse


def _sizes(values: Values) -> dict[str, Any]:
    number, interval = values.integer("num_hidden_layers"), values.integer("no_rope_layer_interval", 4)
    values.get("max_window_layers")  # read by no model
    window = used_window(values, default=None)
    turned = values.several("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(number)]
    if any(one not in (0, 1) for one in turned):
        refuse("no_rope_layers", turned, "a list of 0 and 1", who=WHO)
    if len(turned) != number:
        raise Refused(f"[hf] no_rope_layers has {len(turned)} entries for num_hidden_layers={number} layers")
    default = ["full_attention" if window is None or rope else SLIDING for rope in turned]
    kinds = [
        LayerKind(window=one, rope=bool(rope))
        for one, rope in zip(windows_of(types_of(values, default), window), turned, strict=True)
    ]
    tied = values.flag("tie_word_embeddings", True)
    return {**bias_sizes(values), **stack_sizes(kinds), "tied_embeddings": tied}


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    window = window_in(sizes)
    return {
        **bias_keys(sizes),
        "no_rope_layers": [int(layer.rope_theta is not None) for layer in layers_in(sizes)],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_in(sizes),
    }


SMOLLM3 = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    models="SmolLM3",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    default_theta=2_000_000.0,
)
