"""Adapters of stacks of several kinds are written under the numbers of their layers, and read back."""

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxfb.models.adapted import A, B, LoRA, adapted
from jaxfb.models.transformer import init_params
from jaxfb.pretrained import sizes_of
from jaxfb.pretrained.architectures import architecture_of
from jaxfb.pretrained.peft import load_adapter, save_adapter

GOLDEN = Path(__file__).parent.parent / "golden"
ALL, ATTENTION = LoRA(rank=2, targets=("*",)), LoRA(rank=2, targets=("attention.*",))
# a tensor of PEFT's -> where it is in our parameters
PLACES = {
    "hf_gemma3_tiny": {
        "layers.0.self_attn.q_proj.lora_A": ("leading", "layer_0", "attention", "query", A, ...),
        "layers.4.mlp.down_proj.lora_B": ("layers", "layer_1", "mlp", "down", B, 1),
    },
    "hf_qwen3_moe_sparse_tiny": {
        "layers.0.self_attn.v_proj.lora_B": ("leading", "layer_0", "attention", "value", B, ...),
        "layers.3.self_attn.o_proj.lora_A": ("layers", "layer_0", "attention", "output", A, 1),
        "layers.4.self_attn.q_proj.lora_A": ("layers", "layer_1", "attention", "query", A, 1),
    },
    "hf_deepseek_v3_dense_tiny": {
        "layers.0.self_attn.q_a_proj.lora_A": ("leading", "layer_0", "attention", "query_down", A, ...),
        "layers.2.self_attn.kv_b_proj.lora_B": ("layers", "attention", "key_value_up", B, 1),
    },
}


def drawn(config, lora=ALL):
    shapes = jax.eval_shape(lambda: init_params(adapted(sizes_of(config), lora), jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.mark.parametrize("name", PLACES)
def test_every_layer_has_its_number(name, tmp_path):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    lora = ALL if name == "hf_gemma3_tiny" else ATTENTION
    params = drawn(config, lora)
    save_adapter(tmp_path / "adapter", params, lora, architecture_of(config), "base")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for tensor, (*path, index) in PLACES[name].items():
        leaf = params
        for part in path:
            leaf = leaf[part]
        np.testing.assert_array_equal(stored[f"base_model.model.model.{tensor}.weight"], leaf[index].T)
    other = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path[-1].key in (A, B) else leaf, params
    )
    chex.assert_trees_all_equal(load_adapter(tmp_path / "adapter", other, lora), params)


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("hf_phi3_tiny", "attention.key has no adapter in PEFT's format: transformers has no module"),
        ("hf_deepseek_v3_dense_tiny", "has no adapter in PEFT's format: in a model with experts PEFT takes"),
    ],
)
def test_what_peft_cannot_name_is_refused(name, sentence, tmp_path):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    with pytest.raises(ValueError, match=sentence):
        save_adapter(tmp_path / "adapter", drawn(config), ALL, architecture_of(config), "base")
    assert not (tmp_path / "adapter").exists()


def test_adapters_of_experts_are_exported_merged(tmp_path):
    config = json.loads((GOLDEN / "hf_mixtral_tiny" / "config.json").read_text())
    lora = LoRA(rank=2, targets=("experts.*", "query"))
    params = drawn(config, lora)
    with pytest.raises(ValueError, match="experts have adapters, .* export the merged model"):
        save_adapter(tmp_path / "adapter", params, lora, architecture_of(config), "base")
    assert not (tmp_path / "adapter").exists()
    with pytest.raises(ValueError, match="cannot be read for experts, .* leave it out"):
        load_adapter(tmp_path / "adapter", params, lora)


@pytest.mark.parametrize(
    "key, value",
    [("target_parameters", ["mlp.experts.down_proj"]), ("layer_replication", [[0, 2]]), ("use_qalora", True)],
)
def test_adapters_of_other_kinds_are_refused(key, value, tmp_path):
    config = json.loads((GOLDEN / "hf_llama_tiny" / "config.json").read_text())
    params = drawn(config)
    save_adapter(tmp_path / "adapter", params, ALL, architecture_of(config), "base")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ValueError, match=f"{key}=.* is not supported"):
        load_adapter(tmp_path / "adapter", params, ALL)


def test_leading_layers_have_adapters_too():
    params = drawn(json.loads((GOLDEN / "hf_deepseek_v3_dense_tiny" / "config.json").read_text()))
    assert A in params["leading"]["layer_0"]["mlp"]["gate"] and "mlp" not in params["layers"]
