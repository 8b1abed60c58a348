"""DeepSeek-V3: latent attention, experts chosen by sigmoid scores, a bias and groups, and a shared expert."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind, stack_of
from jaxfb.pretrained.family import Architecture, Values, depths, experts, refuse
from jaxfb.pretrained.rope_keys import grown_keys, grown_scale, rope_keys
from jaxfb.pretrained.tensors import ATTENTION, MLP

_NAMES = {
    **{path: name for path, name in ATTENTION.items() if path.endswith(("_norm.scale", "output.kernel"))},
    **MLP,
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.query_up.kernel": "self_attn.q_b_proj.weight",
    "attention.query_down.kernel": "self_attn.q_a_proj.weight",
    "attention.query_down_norm.scale": "self_attn.q_a_layernorm.weight",
    "attention.key_value_down.kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.key_value_down_norm.scale": "self_attn.kv_a_layernorm.weight",
    "attention.key_value_up.kernel": "self_attn.kv_b_proj.weight",
    "mtp.hidden_norm.scale": "hnorm.weight",
    "mtp.token_norm.scale": "enorm.weight",
    "mtp.project.kernel": "eh_proj.weight",
    "mtp.norm.scale": "shared_head.norm.weight",
    "moe.router.kernel": "mlp.gate.weight",
    "moe.router.bias": "mlp.gate.e_score_correction_bias",
    **{
        path.format(name): stored.format(name)
        for name in ("gate", "up", "down")
        for path, stored in (
            ("moe.experts.{}", "mlp.experts.{{expert}}.{}_proj.weight"),
            ("moe.shared.{}.kernel", "mlp.shared_experts.{}_proj.weight"),
        )
    },
}


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, moe_layer_freq=1)
    refuse(values, scoring_func="sigmoid", topk_method="noaux_tc", attention_bias=False, rms_norm_eps=1e-6)
    for derived in ("head_dim", "qk_head_dim", "num_key_value_heads", "num_local_experts"):
        values.integer_or_none(derived)
    depths(values)
    rotary_size, width = values.integer("qk_rope_head_dim"), values.integer("moe_intermediate_size")
    head_size = values.integer("qk_nope_head_dim") + rotary_size
    grown, dense = grown_scale(values), values.integer("first_k_dense_replace", least=0)
    mixture = {
        **experts(values.integer("n_routed_experts"), values),
        "leading": (LayerKind(layers=dense, experts=False),) if dense else (),
        "expert_mlp_size": width,
        "shared_expert_size": width * values.integer("n_shared_experts", least=0),
        "router_scores": "sigmoid",
        "router_bias": True,
        "router_groups": values.integer_or_none("n_group") or 1,
        "router_top_groups": values.integer_or_none("topk_group") or 1,
        "router_renormalize": values.flag("norm_topk_prob", True),
        "router_scale": values.number("routed_scaling_factor"),
    }
    return {
        **(mixture if dense < values.integer("num_hidden_layers") else {}),
        "head_size": head_size,
        "mtp_as_published": True,
        "num_kv_heads": values.integer("num_attention_heads"),
        "latent": Latent(
            key_value_rank=values.integer("kv_lora_rank"),
            rotary_size=rotary_size,
            value_size=values.integer("v_head_dim"),
            query_rank=values.integer_or_none("q_lora_rank"),
            interleaved=values.flag("rope_interleave", True),
        ),
        "variant": {} if grown is None else {"attention_scale": grown * head_size**-0.5},
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    latent, width = sizes.latent, sizes.expert_mlp_size
    if latent is None or not sizes.num_experts:
        return {}
    return {
        "num_experts_per_tok": sizes.experts_per_token,
        "n_routed_experts": sizes.num_experts,
        "n_shared_experts": sizes.shared_expert_size // width,
        "moe_intermediate_size": width,
        "first_k_dense_replace": len(stack_of(sizes).leading),
        "head_dim": latent.rotary_size,
        "qk_rope_head_dim": latent.rotary_size,
        "qk_nope_head_dim": sizes.head_size - latent.rotary_size,
        "v_head_dim": latent.value_size,
        "kv_lora_rank": latent.key_value_rank,
        "q_lora_rank": latent.query_rank,
        "rope_interleave": latent.interleaved,
        "rope_parameters": {**rope_keys(sizes), **grown_keys(sizes)},
        "n_group": sizes.router_groups,
        "topk_group": sizes.router_top_groups,
        "norm_topk_prob": sizes.router_renormalize,
        "routed_scaling_factor": sizes.router_scale,
        "num_nextn_predict_layers": sizes.mtp_depth,
    }


DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    models="DeepSeek-V3 and R1 in bfloat16, with `model.mtp_depth=1` their multi-token prediction",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    layer_names=_NAMES,
)
