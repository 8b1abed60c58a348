"""Gemma 3, its language model: a window in five of six layers, and rotary positions of its own for each kind."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.families.gemma2 import ACTIVATIONS, NAMES, later_gemma_keys, later_gemma_sizes
from jaxfb.pretrained.family import Architecture, Values
from jaxfb.pretrained.layer_types import FULL, SLIDING, layers_in, stack_sizes, types_of
from jaxfb.pretrained.rope_keys import rope_keys, rope_sizes

_THETA = {SLIDING: 10_000.0, FULL: 1_000_000.0}


def _ropes(values: Values) -> dict[str, dict[str, Any]]:
    """Returns theta and scaling of both kinds, from today's keys or yesterday's."""
    rope = values.get("rope_parameters") or {}
    length = values.get("max_position_embeddings")
    if FULL in rope or SLIDING in rope:
        each = {kind: {"rope_theta": theta, **(rope.get(kind) or {})} for kind, theta in _THETA.items()}
    else:
        full = {"rope_theta": values.get("rope_theta", _THETA[FULL]), **(values.get("rope_scaling") or {})}
        each = {SLIDING: {"rope_theta": values.get("rope_local_base_freq", _THETA[SLIDING])}, FULL: full}
    return {
        kind: rope_sizes({"rope_parameters": found, "max_position_embeddings": length})
        for kind, found in each.items()
    }


def _sizes(values: Values) -> dict[str, Any]:
    values.get("attn_logit_softcapping")  # read by no model
    window, number = values.get("sliding_window", 4096), values["num_hidden_layers"]
    found = [values.get(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    every = found[0] or found[1] or 6
    types = types_of(values, [SLIDING if (layer + 1) % every else FULL for layer in range(number)])
    ropes = _ropes(values)
    local = LayerKind(window=window, rope_scaling=ropes[SLIDING].get("rope_scaling"))
    kinds = {SLIDING: local, FULL: LayerKind(**ropes[FULL])}
    return {
        **later_gemma_sizes(values),
        "rope_theta": ropes[SLIDING]["rope_theta"],
        "rope_scaling": None,  # a kind without scaling takes the model's
        **stack_sizes([kinds[kind] for kind in types]),
        "qk_norm": True,
        "logit_softcap": values.get("final_logit_softcapping"),
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    of_kinds = {SLIDING if layer.window else FULL: rope_keys(layer) for layer in layers_in(sizes)}
    cap = {} if sizes.logit_softcap is None else {"final_logit_softcapping": sizes.logit_softcap}
    return {**later_gemma_keys(sizes), **cap, "rope_parameters": of_kinds}


GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    models="Gemma 3, the language models",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    activations=ACTIVATIONS,
    layer_names=NAMES,
)
