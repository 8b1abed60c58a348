"""Qwen3-MoE: Qwen3 with experts, in every layer or in some."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.family import Architecture, Values, bias_sizes, expert_keys, experts
from jaxfb.pretrained.layer_types import layers_in, stack_sizes, used_window, window_in
from jaxfb.pretrained.tensors import DENSE
from jaxfb.pretrained.values import WHO
from jaxfb.refusal import integer

_NAMES = {
    **DENSE,
    "moe.router.kernel": "mlp.gate.weight",
    **{
        f"moe.experts.{name}": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
    },
}


def _sizes(values: Values) -> dict[str, Any]:
    step, dense = values.integer("decoder_sparse_step", 1), values.several("mlp_only_layers")
    dense = {integer(f"mlp_only_layers[{at}]", one, who=WHO, least=0) for at, one in enumerate(dense)}
    values.get("max_window_layers")  # read by no model: all layers have the window
    window = used_window(values)
    today, before = (values.integer_or_none(name, least=0) for name in ("num_local_experts", "num_experts"))
    number = values.integer("num_experts") if before is None and today is None else before or today or 0
    layers = range(values.integer("num_hidden_layers"))
    has_experts = [bool(number) and layer not in dense and (layer + 1) % step == 0 for layer in layers]
    mixture = {
        **stack_sizes([LayerKind(window=window, experts=some) for some in has_experts], has_experts=True),
        **experts(number, values),
        "expert_mlp_size": values.integer("moe_intermediate_size"),
        "router_renormalize": values.flag("norm_topk_prob"),
    }
    return {**bias_sizes(values), "qk_norm": True, **(mixture if any(has_experts) else {"window": window})}


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    window = window_in(sizes)
    return {
        "attention_bias": sizes.variant.output_bias,
        **expert_keys(sizes),
        **({"use_sliding_window": True, "sliding_window": window} if window else {}),
        "mlp_only_layers": [at for at, layer in enumerate(layers_in(sizes)) if not layer.num_experts],
        "num_experts": sizes.num_experts,
        "moe_intermediate_size": sizes.expert_mlp_size,
        "norm_topk_prob": sizes.router_renormalize,
    }


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    models="Qwen3-MoE, with experts in every layer or in some",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    layer_names=_NAMES,
)
