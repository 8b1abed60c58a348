"""Directories of Hugging Face files: read onto meshes, written back bit for bit, refused with a list."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some_slow
from safetensors.numpy import load_file, save_file
from whole import logits

from jaxfb.forward_backward import get_forward_backward_func
from jaxfb.mesh import make_mesh
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.sharding import abstract, shardings
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.trainable import name_of

GOLDEN = Path(__file__).parent.parent / "golden"
MORE = [
    "hf_llama31_tiny",
    "hf_llama_linear_tiny",
    "hf_mistral_tiny",
    "hf_qwen3_moe_tiny",
    "hf_qwen3_yarn_tiny",
]
MODELS = [f"hf_{name}_tiny" for name in ("llama", "mixtral", "qwen2", "qwen3")]


def loaded(directory, mesh=None, dtype=jnp.float32):
    repository = open_repository(directory)
    sizes = sizes_of(repository.config)
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), dtype))
    if mesh is not None:
        fb = get_forward_backward_func(mesh)
        shapes = abstract(shapes, shardings(fb.param_specs(transformer(sizes), shapes), mesh))
    return repository, sizes, load_params(repository, sizes, shapes)


@pytest.mark.parametrize("name", some_slow(MODELS, fast=("hf_llama_tiny", "hf_mixtral_tiny")))
def test_logits_are_those_of_transformers(name, golden):
    _, sizes, params = loaded(GOLDEN / name, dtype=jnp.float64)
    cases = [case for case in golden("llama_tiny.json")["cases"] if case["inputs"]["model_dir"] == name]
    assert cases
    for case in cases[:2]:
        inputs = case["inputs"]
        tokens = np.asarray(inputs["input_ids"])
        batch = {"tokens": tokens, "segments": np.asarray(inputs["attention_mask"])}
        if inputs["position_ids"] is not None:
            batch["positions"] = np.asarray(inputs["position_ids"])
        ours = logits(sizes, params, batch)
        for row, expected in enumerate(case["expected"]["logits"]):
            for position, theirs in enumerate(expected):
                if theirs is not None and theirs[0] is not None:
                    np.testing.assert_allclose(ours[row, position], theirs, rtol=0, atol=5e-5)


@pytest.mark.slow
def test_architectures_and_rope_scalings_give_the_logits_of_transformers(golden):
    """Sequences of 48 tokens, three times the original length of the scaled models."""
    cases = golden("hf_architectures.json")["cases"]
    assert {case["name"] for case in cases} == {
        "llama31",
        "llama_linear",
        "qwen3_yarn",
        "mistral",
        "qwen3_moe",
    }
    for case in cases:
        inputs, tolerance = case["inputs"], 5e-5
        _, sizes, params = loaded(GOLDEN / inputs["model_dir"], dtype=jnp.float64)
        ours = logits(sizes, params, {"tokens": np.asarray(inputs["input_ids"])})
        picked = np.asarray(ours)[:, inputs["positions"]]
        np.testing.assert_allclose(
            picked, case["expected"]["logits"], rtol=0, atol=tolerance, err_msg=case["name"]
        )


@pytest.mark.parametrize("name", some_slow(MODELS, fast=("hf_qwen2_tiny",)))
def test_a_mesh_gets_the_same_bits(name):
    mesh = make_mesh(fsdp=2, pipe=2, expert=2) if "mixtral" in name else make_mesh(fsdp=4, pipe=2)
    _, _, whole = loaded(GOLDEN / name)
    _, _, cut = loaded(GOLDEN / name, mesh)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(cut))
    chex.assert_trees_all_equal(jax.device_get(whole), jax.device_get(cut))


@pytest.mark.slow
def test_a_tensor_axis_gets_the_same_bits(copied):
    change_config(copied, vocab_size=64)
    sizes = sizes_of(open_repository(copied).config)
    params = init_params(sizes, jax.random.key(0))
    export_model(copied.parent / "even", params, open_repository(copied).config)
    _, _, cut = loaded(copied.parent / "even", make_mesh(fsdp=2, pipe=2, tensor=2))
    assert "tensor" in cut["layers"]["mlp"]["up"]["kernel"].sharding.spec
    chex.assert_trees_all_equal(params, jax.device_get(cut))


@pytest.mark.parametrize("name", [*MODELS, *MORE])
@pytest.mark.parametrize("file_bytes", [pytest.param(10**9, marks=pytest.mark.slow), 20_000])
def test_a_round_trip_is_bitwise(name, file_bytes, tmp_path):
    repository, _, params = loaded(GOLDEN / name)
    export_model(tmp_path / "out", params, repository.config, GOLDEN / name, file_bytes)
    again, _, params_again = loaded(tmp_path / "out")
    chex.assert_trees_all_equal(params, params_again)
    assert again.config["model_type"] == repository.config["model_type"]
    stored = load_file(GOLDEN / name / "model.safetensors")
    assert set(again.tensors) == set(stored)
    assert (file_bytes < 10**6) == (tmp_path / "out" / "model.safetensors.index.json").exists()
    for tensor, value in stored.items():
        np.testing.assert_array_equal(again.read(tensor), value)


def test_bfloat16_goes_through_unchanged(tmp_path):
    repository, _, params = loaded(GOLDEN / "hf_llama_tiny", dtype=jnp.bfloat16)
    export_model(tmp_path / "out", params, repository.config)
    again, _, params_again = loaded(tmp_path / "out", dtype=jnp.bfloat16)
    chex.assert_trees_all_equal(params, params_again)
    assert again.config["dtype"] == "bfloat16" and {t[2] for t in again.tensors.values()} == {"BF16"}


def refusal(directory):
    with pytest.raises(ValueError) as error:
        loaded(directory)
    return str(error.value)


def change_config(directory, **values):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_tensors_that_do_not_fit_are_listed_before_anything_is_read(copied):
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5]
    tensors["model.extra"] = tensors.pop("lm_head.weight")
    save_file(tensors, copied / "model.safetensors")
    text = refusal(copied)
    for part in (
        "lm_head.weight: missing",
        "model.extra: unexpected",
        "model.norm.weight: shape [5], must be [24]",
    ):
        assert part in text


def test_a_tied_head_may_be_stored_again_but_not_with_other_numbers(copied):
    change_config(copied, tie_word_embeddings=True)
    text = refusal(copied)
    assert (
        "lm_head.weight differs from model.embed_tokens.weight" in text
        and "tie_word_embeddings=false" in text
    )
    tensors = load_file(copied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, copied / "model.safetensors")
    assert "head" not in loaded(copied)[2]
    tensors["lm_head.weight"][-1, -1] += 1  # as if training had moved a number
    save_file(tensors, copied / "model.safetensors")
    assert "lm_head.weight differs" in refusal(copied)
    change_config(copied, tie_word_embeddings=False)
    assert "head" in loaded(copied)[2]


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"model_type": "falcon"}, "must be one of llama, mistral, mixtral"),
        ({"hidden_act": "relu"}, "only hidden_act='silu' is"),
        ({"attention_bias": True}, "self_attn.q_proj.bias: missing"),
        (
            {"rope_scaling": {"rope_type": "ntk"}, "rope_parameters": None},
            "default, linear, llama3, yarn, longrope",
        ),
        (
            {"rope_scaling": {"type": "dynamic"}, "rope_parameters": None},
            "with rope_type='default' in config",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
        ({"num_attention_heads": 5}, "head"),
    ],
)
def test_what_cannot_be_computed_is_refused(copied, values, wanted):
    change_config(copied, **values)
    assert wanted in refusal(copied)


def test_a_missing_key_is_named(copied):
    values = json.loads((copied / "config.json").read_text())
    del values["hidden_size"]
    (copied / "config.json").write_text(json.dumps(values))
    assert "must have 'hidden_size'" in refusal(copied)


def test_pickled_truncated_and_outside_files_are_refused(copied):
    content = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(content[:100])
    assert "cannot be read as safetensors" in refusal(copied)
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    assert "is a pickle, which is never loaded" in refusal(copied)
    index = {"weight_map": {"lm_head.weight": "../secret.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside the directory" in refusal(copied)


def test_a_directory_with_files_is_not_written_into(copied):
    repository, _, params = loaded(copied)
    with pytest.raises(ValueError, match="new or an empty directory"):
        export_model(copied, params, repository.config)


def test_only_parts_that_a_device_needs_are_read(monkeypatch):
    repository = open_repository(GOLDEN / "hf_llama_tiny")
    largest, read = [], type(repository).read

    def watched(self, name, index=()):
        found = read(self, name, index)
        largest.append(found.size / np.prod(self.tensors[name][1]))
        return found

    monkeypatch.setattr(type(repository), "read", watched)
    _, _, params = loaded(GOLDEN / "hf_llama_tiny", make_mesh(fsdp=8))
    cut = [name_of(p) for p, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.ndim > 2]
    assert cut and min(largest) == 1 / 8
