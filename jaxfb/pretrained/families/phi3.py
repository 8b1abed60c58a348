"""Phi-3 and Phi-4: Llama with two fused tensors a layer, in some models only part of each head rotated."""

from __future__ import annotations

from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.family import Architecture, Values, refuse
from jaxfb.pretrained.rope_keys import rope_keys, rope_sizes, rotary_share
from jaxfb.pretrained.tensors import DENSE, Rows
from jaxfb.refusal import Refused

_LENGTH = "original_max_position_embeddings"


def _heads(sizes: TransformerConfig) -> tuple[int, ...]:
    size, kv_heads = sizes.head_size or 0, sizes.num_kv_heads or 0
    return size * sizes.num_heads, size * kv_heads, size * kv_heads


def _halves(sizes: TransformerConfig) -> tuple[int, ...]:
    return (sizes.mlp_size or 0,) * 2


_NAMES = {
    **{path: name for path, name in DENSE.items() if not path.endswith("bias")},
    **{
        f"attention.{name}.kernel": Rows("self_attn.qkv_proj.weight", part=part, rows=_heads)
        for part, name in enumerate(("query", "key", "value"))
    },
    **{
        f"mlp.{name}.kernel": Rows("mlp.gate_up_proj.weight", part=part, rows=_halves)
        for part, name in enumerate(("gate", "up"))
    },
}


def _sizes(values: Values) -> dict[str, Any]:
    refuse(values, attention_bias=False)
    values.integer_or_none(_LENGTH)  # without a scaling it means nothing
    # a missing key has its default, which comes before one in rope_parameters too
    rope = rope_sizes(Values({_LENGTH: 4096, **values}), in_part=True)
    scaling = rope.get("rope_scaling")
    if scaling is not None and scaling.kind != "longrope":
        raise Refused(
            f"[hf] rope_type={scaling.kind!r} is not supported in phi3; only default and longrope are"
        )
    return {
        **rope,
        "window": values.integer_or_none("sliding_window"),
        "variant": {"rotary_share": rotary_share(values)},
    }


def _keys(sizes: TransformerConfig) -> dict[str, Any]:
    share, scaling = sizes.variant.rotary_share, sizes.rope_scaling
    # the length of short documents
    length = {} if scaling is None else {_LENGTH: scaling.original_length}
    rope = {**rope_keys(sizes), "partial_rotary_factor": share}
    return {"rope_parameters": rope, "sliding_window": sizes.window, **length}


PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    models="Phi-3 and Phi-4, with short and long contexts (longrope)",
    tested="transformers: logits, losses, gradients",
    sizes=_sizes,
    keys=_keys,
    layer_names=_NAMES,
    rope_in_part=True,
)
