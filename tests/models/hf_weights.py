"""Hugging Face names of Llama and Qwen weights, [out, in] matrices, to and from our own tree."""

import json

import numpy as np
from safetensors.numpy import load_file

from jaxfb.models.config import TransformerConfig

_OUTER = {
    "model.embed_tokens.weight": "embed.embedding",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "head.kernel",
}
_LAYER = {
    "input_layernorm.weight": "attention_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "self_attn.q_norm.weight": "attention.query_norm.scale",
    "self_attn.k_norm.weight": "attention.key_norm.scale",
    "self_attn.o_proj.weight": "attention.output.kernel",
    **{f"mlp.{name}_proj.weight": f"mlp.{name}.kernel" for name in ("gate", "up", "down")},
    **{
        f"self_attn.{name[0]}_proj.{theirs}": f"attention.{name}.{ours}"
        for name in ("query", "key", "value")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    },
}


def load_hf(directory):
    """(TransformerConfig, params float32) of a directory with config.json and model.safetensors."""
    hf = json.loads((directory / "config.json").read_text())
    config = TransformerConfig(
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        mlp_size=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_size=hf.get("head_dim"),
        rope_theta=hf["rope_parameters"]["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        tied_embeddings=hf["tie_word_embeddings"],
        qkv_bias=hf["model_type"] == "qwen2",
        qk_norm=hf["model_type"] == "qwen3",
        loss_chunk=5,
    )
    return config, _from_hf(load_file(directory / "model.safetensors"), config.num_layers)


def hf_leaves(params):
    """{Hugging Face name: array} of a tree like params; matrices stay [in, out]."""
    leaves = {name: _get(params, path) for name, path in _OUTER.items()}
    for name, path in _LAYER.items():
        stacked = _get(params["layers"], path)
        if stacked is not None:
            leaves.update({f"model.layers.{i}.{name}": leaf for i, leaf in enumerate(stacked)})
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def _from_hf(tensors, num_layers):
    params = {"layers": {}}
    for name, path in _OUTER.items():
        if name in tensors:
            _put(params, path, _turn(tensors[name], path))
    for name, path in _LAYER.items():
        if f"model.layers.0.{name}" in tensors:
            one_layer_each = [_turn(tensors[f"model.layers.{i}.{name}"], path) for i in range(num_layers)]
            _put(params["layers"], path, np.stack(one_layer_each))
    return params


def _turn(tensor, path):
    return tensor.T if path.endswith("kernel") else tensor


def _get(tree, path):
    for part in path.split("."):
        tree = tree.get(part, {})
    return None if isinstance(tree, dict) else tree


def _put(tree, path, value):
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value
