"""Qwen3-MoE: Qwen3 with experts, in every layer or in some."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind
from jaxfb.pretrained.family import Architecture, Values, bias_sizes, expert_keys, experts
from jaxfb.pretrained.layer_types import layers_in, stack_sizes, window_in
from jaxfb.pretrained.tensors import DENSE

_NAMES = {
    **DENSE,
    "moe.router.kernel": "mlp.gate.weight",
    **{
        f"moe.experts.{name}": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
    },
}


def _sizes(values: Values) -> dict[str, Any]:
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
    values.get("max_window_layers")  # read by no model: all layers have the window
    window, used = values.get("sliding_window"), values.get("use_sliding_window")
    window = window if used else None
    today, before = values.get("num_local_experts"), values.get("num_experts")
    number = values["num_experts"] if before is None and today is None else before or today or 0
    layers = range(values["num_hidden_layers"])
    has_experts = [bool(number) and layer not in dense and (layer + 1) % step == 0 for layer in layers]
    mixture = {
        **stack_sizes([LayerKind(window=window, experts=some) for some in has_experts], has_experts=True),
        **experts(number, values),
        "expert_mlp_size": values["moe_intermediate_size"],
        "router_renormalize": values.get("norm_topk_prob", False),
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
