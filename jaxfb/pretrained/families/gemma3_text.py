"""Gemma 3, its language model: a window in five of six layers, and rotary positions of its own for each kind."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.families.gemma2 import ACTIVATIONS, NAMES, later_gemma_keys, later_gemma_sizes
from jaxfb.pretrained.family import Architecture, Values, refuse
from jaxfb.pretrained.layer_types import FULL, SLIDING, layers_in, stack_sizes, types_of, windows_of
from jaxfb.pretrained.rope_keys import rope_keys, sizes_of_rope
from jaxfb.pretrained.values import WHO
from jaxfb.refusal import Refused, shown

_THETA = {SLIDING: 10_000.0, FULL: 1_000_000.0}


def _ropes(values: Values) -> dict[str, dict[str, Any]]:
    """Returns theta and scaling of both kinds, from today's keys or yesterday's."""
    rope = values.section("rope_parameters")
    if other := [name for name, value in rope.items() if name not in _THETA and value]:
        raise Refused(
            f"{WHO} rope_parameters of a gemma3_text model has {', '.join(sorted(other))}; it must have one object "
            f"for each type of layers, {' and '.join(_THETA)}"
        )
    theta = dict(_THETA)
    if not rope:
        theta[FULL] = values.number("rope_theta", theta[FULL], above=0)
        theta[SLIDING] = values.number("rope_local_base_freq", theta[SLIDING], above=0)
    each = {kind: rope.section(kind) for kind in _THETA}
    each[FULL] = each[FULL] if rope else _scaling_of_before(values)
    for one in each.values():
        refuse(one, truncate=True)  # transformers looks for it beside the types of layers, where it cannot be
    if (length := values.integer_or_none("original_max_position_embeddings")) is not None:
        raise Refused(
            f"{WHO} original_max_position_embeddings={length} stands beside the rotary positions, where a gemma3_text "
            "model does not read it; move it into the scaling that it belongs to"
        )
    return {kind: sizes_of_rope(each[kind], values, theta[kind]) for kind in _THETA}


def _scaling_of_before(values: Values) -> Values:
    scaling = values.section("rope_scaling")
    if "rope_type" not in scaling and (kind := scaling.get("type", "default")) != "default":
        raise Refused(
            f"{WHO} rope_scaling of a gemma3_text model has type={shown(kind)}, which it does not read; name the kind "
            "rope_type"
        )
    return scaling


def _sizes(values: Values) -> dict[str, Any]:
    values.get("attn_logit_softcapping")  # read by no model
    window, number = values.integer_or_none("sliding_window", 4096), values.integer("num_hidden_layers")
    values.get("_sliding_window_pattern")  # written beside layer_types, and read by no model
    every = values.integer_or_none("sliding_window_pattern") or 6
    types = types_of(values, [SLIDING if (layer + 1) % every else FULL for layer in range(number)])
    ropes = _ropes(values)
    windows_of(types, window)  # refuses local layers without a window
    local = LayerKind(window=window, rope_scaling=ropes[SLIDING].get("rope_scaling"))
    kinds = {SLIDING: local, FULL: LayerKind(**ropes[FULL])}
    return {
        **later_gemma_sizes(values),
        "rope_theta": ropes[SLIDING]["rope_theta"],
        "rope_scaling": None,  # a kind without scaling takes the model's
        **stack_sizes([kinds[kind] for kind in types]),
        "qk_norm": True,
        "logit_softcap": values.number_or_none("final_logit_softcapping"),
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
    rope_by_type=True,
    divided_width=True,
)
