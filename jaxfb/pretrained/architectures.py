"""The architectures that can be read: what their config.json means in sizes of the built-in transformer.

A key that changes what is computed is either understood or refused; `_INERT` lists those that change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.refusal import Refused

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of Hugging Face's transformers.

    model_type, class_name: what its config.json calls it.
    sizes:   config.json -> the fields of `TransformerConfig` that differ from the Llama family's.
    layer_names: our path below one layer -> the tensor's name below "model.layers.N"; "{expert}" numbers experts.
    tested:  what its numbers are compared with by the tests.
    """

    model_type: str
    class_name: str
    sizes: Callable[[Values], dict[str, Any]]
    layer_names: Mapping[str, str]
    tested: str


OUTER_NAMES = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
_ATTENTION = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.key.kernel": "self_attn.k_proj.weight",
    "attention.value.kernel": "self_attn.v_proj.weight",
    "attention.output.kernel": "self_attn.o_proj.weight",
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
}
_DENSE = {
    **_ATTENTION,
    **{f"mlp.{name}.kernel": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_MIXTRAL = {
    **_ATTENTION,
    "moe.router.kernel": "block_sparse_moe.gate.weight",
    "moe.experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "moe.experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
    "moe.experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
}
_QWEN3_MOE = {
    **_ATTENTION,
    "moe.router.kernel": "mlp.gate.weight",
    **{
        f"moe.experts.{name}": f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")
    },
}


def _llama(values: Values) -> dict[str, Any]:
    _refuse(values, attention_bias=False, mlp_bias=False)
    return {}


def _mistral(values: Values) -> dict[str, Any]:
    _refuse(values, sliding_window=None)
    return {}


def _qwen2(values: Values) -> dict[str, Any]:
    _refuse(values, use_sliding_window=False)
    return {"qkv_bias": True}


def _qwen3(values: Values) -> dict[str, Any]:
    _refuse(values, use_sliding_window=False, attention_bias=False)
    return {"qk_norm": True}


def _mixtral(values: Values) -> dict[str, Any]:
    _refuse(values, sliding_window=None)
    return _experts(values["num_local_experts"], values) | {
        "mlp_size": values["intermediate_size"],
        "expert_mlp_size": values["intermediate_size"],
    }


def _qwen3_moe(values: Values) -> dict[str, Any]:
    _refuse(values, mlp_only_layers=[], decoder_sparse_step=1)
    experts = _experts(values.get("num_experts") or values["num_local_experts"], values)
    return {
        **_qwen3(values),
        **experts,
        "expert_mlp_size": values["moe_intermediate_size"],
        "router_renormalize": values.get("norm_topk_prob", False),
    }


def _experts(number: int, values: Values) -> dict[str, Any]:
    """Returns the fields of a mixture; its balance loss is that of all layers together, as transformers computes it."""
    return {
        "num_experts": number,
        "experts_per_token": values["num_experts_per_tok"],
        "balance_coefficient": 0.0,
        "batch_balance_coefficient": values.get("router_aux_loss_coef", 0.001)
        * bool(values.get("output_router_logits")),
        "batch_balance_layers": "together",
    }


ARCHITECTURES = {
    found.model_type: found
    for found in (
        Architecture("llama", "LlamaForCausalLM", _llama, _DENSE, "transformers: logits, losses, gradients"),
        Architecture("mistral", "MistralForCausalLM", _mistral, _DENSE, "transformers: logits"),
        Architecture("qwen2", "Qwen2ForCausalLM", _qwen2, _DENSE, "transformers: logits, losses, gradients"),
        Architecture("qwen3", "Qwen3ForCausalLM", _qwen3, _DENSE, "transformers: logits, losses, gradients"),
        Architecture(
            "mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, "transformers: logits, losses, gradients"
        ),
        Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _QWEN3_MOE, "transformers: logits"),
    )
}


def architecture_of(values: Values) -> Architecture:
    """Returns the architecture that a config.json names.

    Raises:
      ValueError: it names none, or one that cannot be read; or the weights are quantised.
    """
    kind = values.get("model_type")
    if kind not in ARCHITECTURES:
        raise Refused(
            f"[hf] model_type={kind!r} cannot be read; it must be one of {', '.join(sorted(ARCHITECTURES))}"
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "an unknown method")
        raise Refused(f"[hf] the weights are quantised ({method}); use the model's bfloat16 or float32 files")
    return ARCHITECTURES[kind]


def sizes_of(values: Values) -> TransformerConfig:
    """Returns the transformer that a config.json describes.

    Raises:
      ValueError: an unknown architecture, a missing key, or one whose value is not supported.
    """
    found = architecture_of(values)
    _refuse(values, hidden_act="silu")
    try:
        common = {
            "vocab_size": values["vocab_size"],
            "num_layers": values["num_hidden_layers"],
            "hidden_size": values["hidden_size"],
            "mlp_size": values["intermediate_size"],
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
            "head_size": values.get("head_dim"),
            "norm_eps": values["rms_norm_eps"],
            "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
            **_rope(values),
        }
        return TransformerConfig(**{**common, **found.sizes(values)})
    except KeyError as error:
        raise Refused(f"[hf] config.json of a {found.model_type} model must hold {error.args[0]!r}") from None


def _rope(values: Values) -> dict[str, Any]:
    """Returns theta and scaling, from today's `rope_parameters` or yesterday's `rope_theta` and `rope_scaling`."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3", "yarn"):
        raise Refused(
            f"[hf] rope_type={kind!r} is not supported; it must be one of default, linear, llama3, yarn"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, rope, values)}


def _scaling(kind: str, rope: Values, values: Values) -> RopeScaling:
    original = rope.get("original_max_position_embeddings") or values.get("max_position_embeddings")
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            kind,
            rope["factor"],
            original,
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
        )
    _refuse(rope, mscale=None, mscale_all_dim=None, truncate=True)
    return RopeScaling(
        kind,
        rope["factor"],
        original,
        beta_slow=rope.get("beta_slow") or 1.0,
        beta_fast=rope.get("beta_fast") or 32.0,
        attention_factor=rope.get("attention_factor"),
    )


def _refuse(values: Values, **supported: Any) -> None:
    """Refuses keys that have another value than the supported one."""
    for name, wanted in supported.items():
        if values.get(name, wanted) != wanted:
            raise Refused(f"[hf] {name}={values[name]!r} is not supported; only {name}={wanted!r} is")


def describe(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns a config.json of the architecture that computes what this transformer computes.

    Raises:
      ValueError: no architecture in the list has all of its parts.
    """
    kind = _kind_of(sizes)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind].class_name],
        "model_type": kind,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.expert_mlp_size if kind == "mixtral" else sizes.mlp_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": sizes.tied_embeddings,
        "rope_parameters": _rope_parameters(sizes),
    }
    if sizes.num_experts:
        values |= {"num_experts_per_tok": sizes.experts_per_token, "num_local_experts": sizes.num_experts}
    if kind == "qwen3_moe":
        values |= {
            "num_experts": sizes.num_experts,
            "moe_intermediate_size": sizes.expert_mlp_size,
            "norm_topk_prob": sizes.router_renormalize,
        }
    return values


def _kind_of(sizes: TransformerConfig) -> str:
    unknown = {
        "mtp_depth": sizes.mtp_depth,
        "router_bias_rate": sizes.router_bias_rate,
        "shared_expert_size": sizes.shared_expert_size,
        "logit_softcap": sizes.logit_softcap,
        "router_scores=sigmoid": sizes.num_experts and sizes.router_scores != "softmax",
        "router_scale": sizes.num_experts and sizes.router_scale != 1,
        "qkv_bias with qk_norm or experts": sizes.qkv_bias and (sizes.qk_norm or sizes.num_experts),
        "router_renormalize=false without qk_norm": sizes.num_experts
        and not sizes.qk_norm
        and not sizes.router_renormalize,
    }
    if present := [name for name, value in unknown.items() if value]:
        raise Refused(
            f"[hf] no architecture of transformers listed here has {', '.join(present)}; it stays a jaxfb run"
        )
    if sizes.num_experts:
        return "qwen3_moe" if sizes.qk_norm else "mixtral"
    return "qwen3" if sizes.qk_norm else "qwen2" if sizes.qkv_bias else "llama"


def _rope_parameters(sizes: TransformerConfig) -> dict[str, Any]:
    scaling = sizes.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": sizes.rope_theta}
    values = {"rope_type": scaling.kind, "rope_theta": sizes.rope_theta, "factor": scaling.factor}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    if scaling.kind == "yarn":
        values |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast}
        if scaling.attention_factor is not None:
            values["attention_factor"] = scaling.attention_factor
    return values
