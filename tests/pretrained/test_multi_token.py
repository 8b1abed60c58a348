"""DeepSeek-V3's layers of multi-token prediction: left out unless asked for, else with the losses of transformers."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tiny import write_tiny
from tiny_directory import make
from whole import apply

from jaxfb.cli.commands import main
from jaxfb.config.model import ModelConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.pretrained.architectures import describe, with_depths

GOLDEN = Path(__file__).parent.parent / "golden"
SOURCE = GOLDEN / "hf_deepseek_v3_mtp_tiny"
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")


def loaded(depth, directory=SOURCE, dtype=jnp.float32):
    repository = open_repository(directory)
    sizes = replace(sizes_of(repository.config), mtp_depth=depth)
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), dtype))
    return repository, sizes, load_params(repository, sizes, shapes)


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_transformers(tmp_path):
    repository, sizes, params = loaded(1, dtype=jnp.float64)
    expected = json.loads((SOURCE / "multi_token.json").read_text())
    tokens = np.asarray(expected["input_ids"])
    mask = np.ones(tokens.shape)
    mask[:, -1] = 0
    microbatch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "loss_mask": mask}

    @jax.jit
    @jax.grad
    def run(params):
        terms = apply(transformer(sizes), params, microbatch).terms
        return sum(term.total / term.weight for term in terms.values())

    terms = jax.jit(lambda params: apply(transformer(sizes), params, microbatch))(params).terms
    losses = [terms[name].total / terms[name].weight for name in ("cross_entropy", "mtp_1")]
    np.testing.assert_allclose(losses, np.multiply(expected["losses"], [1, 0.3]), rtol=0, atol=2e-6)
    export_model(tmp_path / "gradients", run(params), repository.config)
    stored = open_repository(tmp_path / "gradients")
    assert stored.config["num_nextn_predict_layers"] == 1
    for tensor, theirs in expected["grad_norms"].items():
        ours = np.linalg.norm(stored.read(tensor))
        np.testing.assert_allclose(ours, theirs, rtol=5e-5, atol=1e-6, err_msg=tensor)


@pytest.mark.parametrize("depth", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_round_trip_is_bitwise(depth, tmp_path):
    repository, sizes, params = loaded(depth)
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    behind = {name for name in repository.tensors if name.startswith("model.layers.2.")}
    left_out = COPIES if depth else behind
    assert set(again.tensors) == set(repository.tensors) - set(left_out)
    for tensor in again.tensors:
        np.testing.assert_array_equal(again.read(tensor), repository.read(tensor))
    assert again.config["num_nextn_predict_layers"] == depth
    assert loaded(depth, tmp_path / "out")[1] == sizes


def test_a_model_with_such_a_layer_is_described():
    sizes = loaded(1)[1]
    assert with_depths(sizes_of(describe(sizes)), describe(sizes)) == sizes


def test_layers_that_are_not_there_are_listed():
    with pytest.raises(ValueError, match=r"model.layers.3.self_attn.kv_a_proj_with_mqa.weight: missing"):
        loaded(2)


def test_only_a_directory_that_may_have_such_layers_is_asked_for_them():
    assert ModelConfig.completed({"from": str(SOURCE)})["mtp_depth"] == 0
    assert ModelConfig.completed({"from": str(SOURCE), "mtp_depth": 1})["mtp_depth"] == 1
    with pytest.raises(ValueError, match="mtp_depth=1 differs from 0, that of from="):
        ModelConfig.completed({"from": str(GOLDEN / "hf_llama_tiny"), "mtp_depth": 1})


@pytest.mark.slow
def test_a_run_that_asks_for_the_layer_trains_and_exports_it(tmp_path):
    config = {**open_repository(SOURCE).config, "vocab_size": 320}
    sizes = replace(sizes_of(config), mtp_depth=1)
    export_model(tmp_path / "model", jax.jit(lambda key: init_params(sizes, key))(jax.random.key(0)), config)
    make(tmp_path / "other", num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, mlp_size=16)
    (tmp_path / "model" / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    path = write_tiny(tmp_path, run={"updates": 1}, lr={"warmup": 0}, eval={"every": None, "prompt": ""})
    values = yaml.safe_load(path.read_text())
    values["model"] = {"from": str(tmp_path / "model"), "mtp_depth": 1}
    del values["data"]["tokenizer"]
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path)]) == 0
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = open_repository(tmp_path / "model"), open_repository(tmp_path / "out")
    assert set(after.tensors) == set(before.tensors) and after.config["num_nextn_predict_layers"] == 1
    name = "model.layers.2.eh_proj.weight"
    assert np.abs(after.read(name) - before.read(name)).max() > 0
