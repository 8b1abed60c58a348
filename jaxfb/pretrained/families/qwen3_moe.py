"""Qwen3-MoE: Qwen3 with experts in every layer."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values, bias_sizes, expert_keys, experts, refuse
from jaxfb.pretrained.tensors import ATTENTION

_NAMES = {
    **ATTENTION,
    "moe.router.kernel": "mlp.gate.weight",
    **{
        f"moe.experts.{name}": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
    },
}


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, mlp_only_layers=[], decoder_sparse_step=1)
    values.get("max_window_layers")  # read by no model: all layers have the window
    today, before = values.get("num_local_experts"), values.get("num_experts")
    return {
        **bias_sizes(values),
        "qk_norm": True,
        "window": values.get("sliding_window") if values.get("use_sliding_window") else None,
        **experts(before or today or values["num_experts"], values),
        "expert_mlp_size": values["moe_intermediate_size"],
        "router_renormalize": values.get("norm_topk_prob", False),
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    return {
        "attention_bias": sizes.variant.output_bias,
        **expert_keys(sizes),
        **({"use_sliding_window": True, "sliding_window": sizes.window} if sizes.window else {}),
        "num_experts": sizes.num_experts,
        "moe_intermediate_size": sizes.expert_mlp_size,
        "norm_topk_prob": sizes.router_renormalize,
    }


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    models="Qwen3-MoE with experts in every layer",
    tested="transformers: logits",
    sizes=_sizes,
    keys=_keys,
    layer_names=_NAMES,
)
